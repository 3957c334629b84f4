"""What the simple checkpoint refuses to load, with nothing live touched."""

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nanotrain_core.builtin.configs import GridConfig, SimpleCheckpointConfig
from nanotrain_core.checkpoint import simple as simple_checkpoint
from nanotrain_core.checkpoint.simple import SimpleCheckpoint
from nanotrain_core.contracts import Block, TrainState
from nanotrain_core.errors import CheckpointError, PluginError
from nanotrain_core.layout.grid import Grid
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.testing import run_ranks


def state(tensor):
    return TrainState([Block("exp_avg/weight", tuple(tensor.shape), (0, 0), tensor)], {"step": 1}, {})


@pytest.mark.parametrize(
    ("live", "words"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), "exp_avg/weight is kept in F32, expected BF16"),
        (torch.zeros(2, 4), r"exp_avg/weight has shape \(2, 3\), expected \(2, 4\)"),
    ],
)
def test_a_tensor_of_another_dtype_or_shape_is_refused(tmp_path, live, words):
    checkpoint = SimpleCheckpoint(SimpleCheckpointConfig())
    checkpoint.open(tmp_path, Mesh(Grid(GridConfig()).layout(1)))
    checkpoint.save(1, state(torch.rand(2, 3)))
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load("1", state(live))
    assert not live.any()


def test_a_tensor_that_no_rank_wants_is_refused_rather_than_lost_with_the_next_save(tmp_path):
    """Moments of a parameter that is trained no more were dropped without a word, if others had some."""
    checkpoint = SimpleCheckpoint(SimpleCheckpointConfig())
    checkpoint.open(tmp_path, Mesh(Grid(GridConfig()).layout(1)))
    live = [Block(name, (2,), (0,), torch.zeros(2)) for name in ("exp_avg/v", "exp_avg/w")]
    checkpoint.save(1, TrainState(live, {"step": 1}, {}))
    with pytest.raises(CheckpointError, match="it holds exp_avg/v, which this run has no place for"):
        checkpoint.load("1", TrainState(live[1:], {}, {}))


@pytest.mark.parametrize(
    ("whole", "offset", "shape"),
    [
        ((4,), (3,), (2,)),
        ((4,), (-1,), (2,)),
        ((4,), (0, 0), (2, 1)),
        ((4, 2), (0, 0), (2,)),
        ((), (0,), (1,)),
    ],
    ids=str,
)
def test_a_block_that_is_no_part_of_the_whole_is_refused_by_name(whole, offset, shape):
    with pytest.raises(PluginError, match=r"block exp_avg/w of a checkpoint: shape .* is no part of "):
        Block("exp_avg/w", whole, offset, torch.zeros(shape))


def test_blocks_that_overlap_and_leave_a_hole_are_refused_though_their_numbers_add_up(tmp_path):
    checkpoint = SimpleCheckpoint(SimpleCheckpointConfig())
    checkpoint.open(tmp_path, Mesh(Grid(GridConfig()).layout(1)))
    blocks = [Block("weight", (4,), (begin,), torch.zeros(2)) for begin in (0, 1)]
    with pytest.raises(
        CheckpointError, match=r"weight are not the whole tensor: blocks at \(0,\) and \(1,\) overlap"
    ):
        checkpoint.save(1, TrainState(blocks, {"step": 1}, {}))


def load_where_rank_1_cannot(folder, which, how):
    """Return the error of a load on this rank: on rank 1 the file is not there, or cannot be opened."""
    rank = dist.get_rank()
    checkpoint = SimpleCheckpoint(SimpleCheckpointConfig())
    checkpoint.open(folder, Mesh(Grid(GridConfig()).layout(2), rank=rank))
    live = torch.zeros(2, 3)
    broken = {
        "missing": (Path, "is_file", lambda path: False),
        "unreadable": (simple_checkpoint, "safe_open", stale),
    }
    patch = mock.patch.object(*broken[how]) if rank == 1 else nullcontext()
    with patch, pytest.raises(CheckpointError) as refused:
        checkpoint.load(which, state(live))
    assert not live.any()
    return str(refused.value)


def stale(*_, **__):
    raise OSError("Stale file handle")


@pytest.mark.parametrize(
    ("which", "how", "words"),
    [
        ("1", "missing", "rank 1: no checkpoint at "),
        ("1", "unreadable", "rank 1: "),
        ("latest", "unreadable", "rank 1: "),
    ],
)
def test_what_one_rank_cannot_read_is_refused_on_all(tmp_path, which, how, words):
    checkpoint = SimpleCheckpoint(SimpleCheckpointConfig())
    checkpoint.open(tmp_path, Mesh(Grid(GridConfig()).layout(1)))
    checkpoint.save(1, state(torch.rand(2, 3)))
    one, other = run_ranks(load_where_rank_1_cannot, 2, tmp_path, which, how)
    assert one == other
    assert one.startswith(words)


def load_where_each_sees_its_own(folder, which):
    """Return the error of a load on this rank, which has a folder of its own."""
    rank = dist.get_rank()
    checkpoint = SimpleCheckpoint(SimpleCheckpointConfig())
    checkpoint.open(folder / str(rank), Mesh(Grid(GridConfig()).layout(2), rank=rank))
    live = torch.zeros(2, 3)
    sent = checkpoint.path(1)
    with (
        mock.patch.object(checkpoint, "_newest_whole", return_value=(sent, {})),
        pytest.raises(CheckpointError) as refused,
    ):
        checkpoint.load(which, state(live))
    assert not live.any()
    return str(refused.value)


@pytest.mark.parametrize("which", ["1", "latest"])
def test_ranks_that_see_different_files_under_one_name_are_refused(tmp_path, which):
    """Each host has a disk of its own, or one still sees what another has replaced: both files are whole."""
    for rank in range(2):
        checkpoint = SimpleCheckpoint(SimpleCheckpointConfig())
        checkpoint.open(tmp_path / str(rank), Mesh(Grid(GridConfig()).layout(1)))
        checkpoint.save(1, state(torch.full((2, 3), float(rank))))
    one, other = run_ranks(load_where_each_sees_its_own, 2, tmp_path, which)
    assert one == other
    assert one.startswith("rank 1: ")
    assert one.endswith("is another checkpoint there than on rank 0")


def load_where_nothing_may_be_changed(folder, change):
    """Return the error of a load on this rank, where ``change`` of the folder is not permitted."""
    checkpoint, rank = SimpleCheckpoint(SimpleCheckpointConfig()), dist.get_rank()
    forbidden = PermissionError(13, "Permission denied", "a file")

    def begin():
        checkpoint.open(folder, Mesh(Grid(GridConfig()).layout(2), rank=rank))
        checkpoint.load("latest", state(torch.zeros(2, 3)))

    with (
        mock.patch.object(simple_checkpoint, change, side_effect=forbidden),
        pytest.raises(CheckpointError) as refused,
    ):
        begin()
    return str(refused.value)


@pytest.mark.parametrize("change", ["remove_leftovers", "set_branch_aside", "quarantine_checkpoint"])
def test_a_folder_that_cannot_be_changed_is_told_on_all_ranks(tmp_path, change):
    """Rank 0 had ended with a traceback, and the others waited for it."""
    checkpoint = SimpleCheckpoint(SimpleCheckpointConfig())
    checkpoint.open(tmp_path, Mesh(Grid(GridConfig()).layout(1)))
    checkpoint.save(1, state(torch.rand(2, 3)))
    checkpoint.path(2).write_bytes(b"damaged")
    told = run_ranks(load_where_nothing_may_be_changed, 2, tmp_path, change)
    assert told == [f"{tmp_path} cannot be written: Permission denied"] * 2


def busy(path, missing_ok=False):
    raise OSError(16, "Device or resource busy", str(path))


def test_a_leftover_that_cannot_be_deleted_refuses_no_resume(tmp_path, capfd):
    """As one that another client of a network file system has open."""
    leftover = tmp_path / ".step-00000001.safetensors.1.tmp"
    leftover.touch()
    checkpoint = SimpleCheckpoint(SimpleCheckpointConfig())
    with mock.patch.object(Path, "unlink", busy):
        checkpoint.open(tmp_path, Mesh(Grid(GridConfig()).layout(1)))
    assert "a leftover could not be deleted" in "".join(capfd.readouterr())
    checkpoint.open(tmp_path, Mesh(Grid(GridConfig()).layout(1)))
    assert not leftover.exists()


def test_an_old_checkpoint_that_cannot_be_deleted_fails_no_save(tmp_path, capfd):
    """Complete saves counted as failed, until the run ended."""
    checkpoint = SimpleCheckpoint(SimpleCheckpointConfig(keep=1))
    checkpoint.open(tmp_path, Mesh(Grid(GridConfig()).layout(1)))
    checkpoint.save(1, state(torch.rand(2, 3)))
    unlink = Path.unlink

    def in_use(path, missing_ok=False):
        busy(path) if path.suffix == ".safetensors" else unlink(path, missing_ok)

    with mock.patch.object(Path, "unlink", in_use):
        checkpoint.save(2, state(torch.rand(2, 3)))
    assert "an old checkpoint could not be deleted" in "".join(capfd.readouterr())
    assert checkpoint.steps() == [1, 2]
    checkpoint.save(3, state(torch.rand(2, 3)))
    assert checkpoint.steps() == [3]


ODD = (torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn)


def save_own(folder):
    """Save and load what each rank has of its own; return whether it is the same."""
    mesh = Mesh(Grid(GridConfig()).layout(2), rank=dist.get_rank())
    checkpoint = SimpleCheckpoint(SimpleCheckpointConfig())
    checkpoint.open(folder, mesh)
    own = {str(dtype): torch.tensor([[0, 1], [mesh.rank, 0]]).to(dtype).t() for dtype in ODD}
    own |= {"strided": torch.ones(5)[::5] if mesh.rank else torch.zeros(1)}
    own |= {"scalar": torch.tensor(float(mesh.rank)), "empty": torch.empty(0)}
    with mock.patch.object(dist, "gather_object", side_effect=AssertionError("held by rank 0 all at once")):
        checkpoint.save(1, TrainState([], {"step": 1}, own))
    found = checkpoint.load("1", TrainState([], {}, {}))
    assert found.rank_tensors.keys() == own.keys()
    return all(torch.equal(found.rank_tensors[name], tensor) for name, tensor in own.items())


def test_what_each_rank_has_of_its_own_is_sent_one_by_one(tmp_path):
    """It may be buffers of a script, of any dtype: NCCL's collective of objects needs all on one device."""
    assert run_ranks(save_own, 2, tmp_path) == [True, True]
