"""A snapshot is one when it is sealed, as it was sealed, and never otherwise."""

import os
import signal

import pytest
import torch
from nanotrain_memory_snapshots.seal import Moment, Seal, parse
from nanotrain_memory_snapshots.slot import HEAD, Slot, checksum, to_write

from nanotrain_core.api import CheckpointError


def moment(step, rollbacks=0):
    return Moment(rollbacks, step, "life")


def fill(slot, step, value=7, nbytes=256):
    payload = slot.begin(nbytes)
    payload.fill_(value)
    seal = Seal(
        rank=3, moment=moment(step), form=1, nbytes=nbytes, checksum=checksum(payload), meta={"step": step}
    )
    slot.close(seal.text(), seal.moment)
    return seal


def test_another_process_finds_what_was_sealed(tmp_path):
    seal = fill(Slot(tmp_path, "own-0"), 5)
    again = Slot(tmp_path, "own-0")
    assert (again.seal(), again.moment, again.damage()) == (seal, moment(5), "")
    assert torch.equal(again.payload(256), torch.full((256,), 7, dtype=torch.uint8))


def test_it_is_none_from_when_it_is_written_over_until_it_is_sealed(tmp_path):
    slot = Slot(tmp_path, "own-0")
    fill(slot, 5)
    slot.begin(256)[:10] = 0
    assert Slot(tmp_path, "own-0").seal() is None


def test_a_process_killed_while_it_writes_leaves_none(tmp_path):
    """SIGKILL at any of the points in between: either the old one, or none, or the new one."""
    fill(Slot(tmp_path, "own-0"), 1)
    for point in ("unlink", "fill_", "write_bytes", "replace"):
        pid = os.fork()
        if pid == 0:
            for owner in (type(tmp_path), torch.Tensor):
                if hasattr(owner, point):
                    setattr(owner, point, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            fill(Slot(tmp_path, "own-0"), 2, value=9)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        found = Slot(tmp_path, "own-0")
        assert (found.moment, found.damage() == "") in [(moment(1), True), (None, False)], point


@pytest.mark.parametrize("at", [HEAD, HEAD + 255])
def test_a_flipped_bit_of_its_bytes_is_named(tmp_path, at):
    slot = Slot(tmp_path, "own-0")
    fill(slot, 5)
    with slot.bytes.open("r+b") as file:
        file.seek(at)
        file.write(b"\x06")
    assert Slot(tmp_path, "own-0").damage() == f"{slot.bytes} has not the bytes that were sealed"


def test_any_flipped_bit_of_its_text_makes_it_none(tmp_path):
    text = fill(Slot(tmp_path, "own-0"), 5).text()
    whole = parse(text)
    for at in range(len(text) - 1):
        damaged = bytearray(text)
        damaged[at] ^= 4
        try:
            assert parse(bytes(damaged)) == whole, at
        except CheckpointError:
            continue


def test_bytes_that_are_gone_or_cut_short_are_named(tmp_path):
    slot = Slot(tmp_path, "own-0")
    fill(slot, 5)
    os.truncate(slot.bytes, 100)
    assert "has not the 320 bytes" in Slot(tmp_path, "own-0").damage()
    slot.bytes.unlink()
    assert "cannot be read" in Slot(tmp_path, "own-0").damage()


def test_an_empty_slot_is_written_first_then_the_oldest(tmp_path):
    slots = [Slot(tmp_path, f"own-{n}") for n in range(3)]
    fill(slots[1], 4)
    fill(slots[0], 5)
    assert to_write(slots) is slots[2]
    fill(slots[2], 3)
    assert to_write(slots) is slots[2]


def test_what_comes_after_a_rollback_is_later_than_any_step_before_it():
    assert moment(9) < moment(4, rollbacks=1) < moment(5, rollbacks=1)


def test_how_far_the_run_has_come_outlives_the_seal(tmp_path):
    slot = Slot(tmp_path, "own-0")
    assert slot.reached() == (0, 0)
    fill(slot, 5)
    slot.note_reached(1, 6)
    slot.begin(256)
    assert Slot(tmp_path, "own-0").reached() == (1, 6)
    slot.clear()
    assert Slot(tmp_path, "own-0").reached() == (0, 0)
