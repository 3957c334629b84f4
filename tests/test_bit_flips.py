"""A bit of weights, masters or optimizer state that flips between two updates ends the run and is named."""

import pytest

from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import Corrupted
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.flipped import INTEGER
from nanotrain_core.testing.probe import make_engine

ZERO = Case("optimizer", use="zero12", config={"stage": 2, "bucket_mb": 0.01}, topology={"dp": 2})
TP = Case("parallel", use="tp", topology={"tp": 2})
MASTERS = {"precision": {"use": "bf16"}}


class FlipsState(Monitor):
    """Flips the last bit of a tensor of the state after a step, once it was hashed."""

    def __init__(self, rank, step, prefix):
        self.rank, self.step, self.prefix, self.flipped = rank, step, prefix, None

    def on_start(self, run):
        self.mine = run.rank == self.rank

    def on_step_end(self, end):
        if self.mine and end.step == self.step:
            block = next(b for b in end.state().blocks if b.name.startswith(self.prefix) and b.tensor.numel())
            flat = block.tensor.detach().view(-1)
            flat.view(INTEGER[flat.element_size()])[-1] ^= 1
            self.flipped = block.name


def train(case, changes, flip):
    engine = make_engine(case, {"monitor": [{"use": "bit_flips", "every": 1}], **changes})
    engine.events.monitors = [*engine.events.monitors, *([flip] if flip else [])]
    try:
        engine.fit()
    except Corrupted as problem:
        return str(problem), flip and flip.flipped
    return None, flip and flip.flipped


@pytest.mark.full_cases(
    "optimizer state-the last one", "masters-a step follows", "masters-the last one", "weights-a step follows"
)
@pytest.mark.parametrize("step", [1, 4], ids=["a step follows", "the last one"])
@pytest.mark.parametrize(
    ("case", "changes", "prefix"),
    [(ZERO, {}, "exp_avg/"), (ZERO, MASTERS, "master/"), (TP, {}, "layers.")],
    ids=["optimizer state", "masters", "weights"],
)
def test_a_flip_on_one_rank_ends_all_and_is_named(case, changes, prefix, step):
    changes = {**changes, "run": {"steps": 4}}
    found = run_ranks(train, 2, case, changes, FlipsState(1, step, prefix))
    name = found[1][1]
    assert name is not None
    text = f"{name} has other bits on rank 1 than the update of step {step} left, and nothing writes to it"
    assert [said.startswith(text) for said, _ in found] == [True, True]


def test_it_is_looked_for_in_every_so_many_steps_alone():
    every = {"monitor": [{"use": "bit_flips", "every": 3}], "run": {"steps": 4}}
    assert run_ranks(train, 2, ZERO, every, FlipsState(0, 2, "exp_avg/"))[1] == (None, None)
    (said, name), _ = run_ranks(train, 2, ZERO, every, FlipsState(0, 3, "exp_avg/"))
    assert name in said


@pytest.mark.full_cases("zero2", "bf16 moments", "weights on their way", "tp")
@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (ZERO, {}),
        (ZERO, {"optimizer": {"use": "zero12", "stage": 1, "moment_dtype": "int8"}}),
        (ZERO, {"optimizer": {"use": "zero12", "stage": 2, "overlap": True}}),
        (TP, MASTERS),
        (TP, {"optimizer": {"use": "adamw", "moment_dtype": "bfloat16"}}),
    ],
    ids=["zero2", "int8 moments", "weights on their way", "tp", "bf16 moments"],
)
def test_a_sound_run_is_left_alone(case, changes):
    changes = {**changes, "run": {"steps": 4}, "evaluation": {"every": 2, "sequences": 4}}
    assert run_ranks(train, 2, case, changes, None) == [(None, None)] * 2
