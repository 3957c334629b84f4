"""The disk that a run writes to: space, speed, locks, and what kind it is."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanotrain_doctor.findings import Finding, bad, good, note, size, warning

#: File systems that end with the machine, or with the container.
VOLATILE = {"tmpfs": "the machine", "ramfs": "the machine", "overlay": "the container"}
#: Bytes a second below which checkpoints are worth a thought: 1.5 GB of a 125M model take half a minute.
SLOW = 50e6


def examine_disk(
    folder: Path,
    *,
    megabytes: int = 64,
    root: Path = Path("/"),
    statvfs: Callable[[Path], Any] = os.statvfs,
    write: Callable[[int, bytes], int] = os.write,
) -> list[Finding]:
    """Look at the disk of a run folder that may not exist yet; what is written is removed again.

    Args:
        folder: where runs would be.
        megabytes: to write.
        root: where ``/proc`` is.
        statvfs: tells the space of a path.
        write: writes to an open file.
    """
    there = nearest(folder)
    findings = [free_space(there, statvfs)]
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            findings.append(speed(file.fileno(), megabytes * 2**20, write))
            findings.append(locks(file.fileno()))
    except OSError as problem:
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = (
            "free space, or have the quota raised" if full else "run.folder, or --folder, that can be written"
        )
        findings.append(bad("disk", f"{there} cannot be written: {problem.strerror}", remedy))
    findings.append(kind(there, root))
    return findings


def nearest(folder: Path) -> Path:
    """Return the folder, or the nearest path above it that is there: a file, if one is in the way."""
    path = folder.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def free_space(folder: Path, statvfs: Callable[[Path], Any] = os.statvfs) -> Finding:
    """Judge bytes and files that still fit."""
    room = statvfs(folder)
    free, total = room.f_frsize * room.f_bavail, room.f_frsize * room.f_blocks
    values = {"folder": str(folder), "free": free, "total": total, "files": room.f_favail}
    text = f"{size(free)} of {size(total)} at {folder}"
    remedy = "free space, or name a run.folder on another disk"
    if free < 2**30:
        return bad("disk space", text, remedy, **values)
    if room.f_files and room.f_favail < 1000:
        return bad("disk space", f"{text}, but only {room.f_favail} more files", remedy, **values)
    if free < 10 * 2**30:
        return warning("disk space", text, f"{remedy}; `nanotrain plan` says what checkpoints take", **values)
    return good("disk space", text, **values)


def speed(file: int, count: int, write: Callable[[int, bytes], int] = os.write) -> Finding:
    """Write ``count`` bytes that do not compress, sync them, read them back from the disk.

    Raises:
        OSError: the disk does not take them.
    """
    block = os.urandom(2**20)
    began = time.monotonic()
    for _ in range(count // len(block)):
        rest = block
        while rest:
            rest = rest[write(file, rest) :]
    os.fsync(file)
    written = time.monotonic()
    _small_sync(file)
    synced = time.monotonic()
    if hasattr(os, "posix_fadvise"):  # else the page cache is read
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(file, 0, os.SEEK_SET)
    reading, same = time.monotonic(), True
    for _ in range(count // len(block)):
        same = os.read(file, len(block)) == block and same
    read = time.monotonic()
    if not same:
        return bad("disk", "what was read is not what was written", "do not use this disk: have it examined")
    return judge_speed(count / (written - began), count / (read - reading), synced - written)


def judge_speed(write: float, read: float, sync: float) -> Finding:
    """Judge bytes a second written, with fsync, and read; and the seconds of an fsync of 4 KiB."""
    values = {"write": write, "read": read, "fsync": sync}
    text = f"writes {write / 1e6:.0f} MB/s with fsync, reads {read / 1e6:.0f} MB/s"
    text += f", fsync of a page {sync * 1e3:.1f} ms"
    if write < SLOW:
        remedy = "a faster disk, or fewer checkpoints: sharded_v2 writes while training goes on"
        return warning("disk", text, remedy, **values)
    return good("disk", text, **values)


def locks(file: int) -> Finding:
    """Judge whether files can be locked: the lock of a run folder keeps a second run out."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
    except OSError as problem:
        remedy = "mount it with locks (Lustre: -o flock): nothing keeps two runs out of one folder"
        return warning("file locks", f"none: {problem.strerror}", remedy)
    return good("file locks", "work")


def kind(folder: Path, root: Path = Path("/")) -> Finding:
    """Judge whether what is written outlives the machine or the container."""
    best, found = "", "unknown"
    try:
        mounts = (root / "proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        mounts = []
    for line in mounts:
        _, at, name, *_ = (*line.split(), "", "", "")
        at = at.replace("\\040", " ")
        if len(at) >= len(best) and folder.is_relative_to(at or "-"):
            best, found = at, name
    if found in VOLATILE:
        remedy = "a run.folder on a disk that stays"
        text = f"{found}: checkpoints would end with {VOLATILE[found]}"
        return warning("file system", text, remedy, type=found)
    return note("file system", found, type=found)


def _small_sync(file: int) -> None:
    os.pwrite(file, b"\0" * 4096, os.fstat(file).st_size)
    os.fsync(file)
