"""A rank's heartbeats: on a disk that fills up, and half written when they are read."""

import subprocess
import sys

import pytest

from nanotrain_core.errors import LaunchError
from nanotrain_core.watch.beats import SLOT, BeatFile, read_beats

FILLS_UP = """
import sys, time
from pathlib import Path
from nanotrain_core.watch.hang import HangWatch
from nanotrain_core.watch.progress import Progress
from nanotrain_core.watch.watchdog import Watchdog

scratch, folder = map(Path, sys.argv[1:])
progress = Progress()
progress.note("data", 1)
watch = HangWatch(scratch, folder, timeout=0.6)
Watchdog(progress, 3, timeout=0.6, folder=folder, scratch=scratch)
time.sleep(0.2)  # a beat
try:
    (scratch / "fills").write_bytes(bytes(2**17))
    sys.exit("there was space")
except OSError:
    pass
until = time.monotonic() + 2.5
while time.monotonic() < until:
    progress.note("data", 2)
    watch.look()
    time.sleep(0.02)
(beat,) = watch._beats()
print(watch.hang, beat.step, beat.count > 20)
"""


def test_a_full_disk_stops_no_heartbeat(tmp_path):
    """Healthy ranks counted as silent, and were killed."""
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("it mounts a small disk, which needs root")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    mount = f"mount -t tmpfs -o size=64k none {scratch}"
    words = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable]
    ended = subprocess.run(
        [*words, "-c", FILLS_UP, scratch, tmp_path], check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, "None 2 True\n"), ended.stderr


def test_a_beat_that_is_half_written_is_ignored_for_the_one_before(tmp_path):
    file = BeatFile(tmp_path, 3)
    assert [*read_beats(tmp_path)] == []  # it is allocated, and has none
    file.write({"rank": 3, "count": 199})
    file.write({"rank": 3, "count": 200})
    assert [*read_beats(tmp_path)] == [{"rank": 3, "count": 200, "tick": 2}]
    before = file.path.read_bytes()
    file.write({"rank": 3, "count": 311})
    after = file.path.read_bytes()
    assert len(after) == len(before) == 2 * SLOT
    changed = [at for at in range(2 * SLOT) if after[at] != before[at]]
    assert {at // SLOT for at in changed} == {1}
    for cut in changed[1:]:
        file.path.write_bytes(after[:cut] + before[cut:])
        assert [beat["count"] for beat in read_beats(tmp_path)] == [200]
    file.delete()
    assert [*read_beats(tmp_path)] == []


def test_a_place_without_space_is_named_at_the_start(tmp_path):
    gone = tmp_path / "gone"
    with pytest.raises(LaunchError, match="rank 3") as said:
        BeatFile(gone, 3)
    assert str(said.value) == (
        f"the heartbeats of rank 3 cannot be written to {gone}: No such file or directory; "
        "free space there, or set TMPDIR to another folder"
    )
