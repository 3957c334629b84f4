"""Which sequences a run has taken, whatever batches it was resumed with."""

import json
from itertools import product

import attrs
import numpy as np
import pytest
import torch
from test_run import metrics

from nanotrain_core.batch import IGNORE, Batch, Shard
from nanotrain_core.checkpoint.run_state import state_problems
from nanotrain_core.contracts import Monitor
from nanotrain_core.data.order import SequenceData
from nanotrain_core.errors import PluginError
from nanotrain_core.recipe.tree import BatchConfig, EvaluationConfig
from nanotrain_core.run.feed import DataFeed
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine


class Numbers:
    """Data whose sequences are their own numbers."""

    bytes_per_token, loss_counts = None, None
    position = 0

    def train_batch(self, sequences, shard):
        first, self.position = self.position, self.position + sequences
        tokens = torch.arange(first, self.position)[:, None]
        return Batch(tokens, tokens)

    def meta(self):
        return {"position": self.position}

    def load_meta(self, meta):
        self.position = meta["position"]


def feed(sequences, before=None):
    data, shape = Numbers(), BatchConfig(sequences=sequences, microbatch=sequences, length=1)
    made = DataFeed(data, data, shape, EvaluationConfig(), Shard(0, 1), torch.device("cpu"))
    if before is not None:
        made.load_meta(json.loads(json.dumps(before.meta())))
    return made


def take(fed, steps):
    """Take steps and return the first sequence of each."""
    return [fed.microbatches()[0].tokens[0].item() for _ in range(steps)]


@pytest.mark.parametrize("skipped", [[], [(16, 32)], [(24, 44), (52, 56)], [(0, 8)]])
def test_the_last_steps_are_those_taken_also_before_a_resume_with_other_batches(skipped):
    fed = feed(8)
    fed.skipped = list(skipped)
    firsts = take(fed, 5)
    for sequences in (4, 6):
        fed = feed(sequences, before=fed)
        firsts += take(fed, 3)
    for steps in range(1, len(firsts) + 1):
        assert fed.of_last(steps) == (firsts[-steps], fed.taken)


def test_after_a_rollback_into_the_time_before_the_resume_they_are_still():
    early = feed(8)
    take(early, 2)
    saved = feed(4, before=early)
    firsts = [0, 8, *take(saved, 1)]
    again = feed(2, before=saved)
    take(again, 3)
    again.load_meta(early.meta())  # back to a checkpoint of the first launch
    firsts = [0, 8, *take(again, 4)]
    assert firsts[2:] == [16, 18, 20, 22]
    assert [again.of_last(steps)[0] for steps in range(1, 7)] == firsts[::-1]


class Rows(Numbers):
    """Numbers of which each rank gets its rows, and as many to validate on."""

    def train_batch(self, sequences, shard):
        tokens = super().train_batch(sequences, shard).tokens[list(shard.rows(sequences))]
        return Batch(tokens, tokens)

    def validation_batch(self, index, sequences, shard):
        self.position = index * sequences
        return self.train_batch(sequences, shard)


@pytest.mark.parametrize(
    ("sequences", "microbatch", "sizes"),
    [
        (8, 4, [[4, 4]]),
        (7, 3, [[3, 3, 1]]),
        (2, 3, [[2]]),
        (7, 3, [[3], [2], [2]]),
        (5, 2, [[2, 1], [1, 1]]),
        (11, 2, [[2, 2, 2], [2, 2, 1]]),
        (13, 3, [[3, 1], [2, 1], [2, 1], [2, 1]]),
    ],
)
def test_every_rank_has_as_many_microbatches_the_last_of_them_smaller(sequences, microbatch, sizes):
    shape, seen, ranks = BatchConfig(sequences=sequences, microbatch=microbatch, length=1), [], len(sizes)
    validated = []
    for rank in range(ranks):
        data, shard = Rows(), Shard(rank, ranks)
        fed = DataFeed(data, data, shape, EvaluationConfig(sequences=1), shard, torch.device("cpu"))
        seen.append(fed.microbatches())
        validated.append([batch for batch, _ in fed.validation()])
    assert sorted([[part.sequences for part in mine] for mine in seen], reverse=True) == sizes
    for found in (seen, validated):
        taken = torch.cat([part.tokens for mine in found for part in mine])
        assert taken[:, 0].tolist() == list(range(sequences))
    assert {len(mine) for mine in (*seen, *validated)} == {shape.microbatches(ranks)}


class Evaluated(Monitor):
    def on_evaluation(self, report):
        self.report = report


def test_rows_that_fill_up_the_last_validation_batch_are_no_positions():
    """They counted as ignored targets, of which health warned."""
    monitor = Evaluated()
    changes = {"run": {"steps": 1}, "evaluation": {"sequences": 100}}
    engine = make_engine(Case("optimizer", use="sgd"), changes, callbacks=[monitor])
    engine.fit()
    recipe = engine.run.recipe
    assert recipe.data.config.validation_sequences % recipe.batch.sequences
    assert monitor.report.positions == monitor.report.tokens


class Masked(SequenceData):
    """Ten held-out sequences of four tokens: every other target is ignored, and all of every third one."""

    bytes_per_token, loss_counts = None, None

    def read_batch(self, numbers, *, validation):
        tokens = torch.ones(len(numbers), 4, dtype=torch.int64)
        targets = torch.tensor([1, IGNORE, 1, IGNORE]).repeat(len(numbers), 1)
        targets[[number % 3 == 0 for number in numbers]] = IGNORE
        return Batch(tokens, targets)


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (3, 1), (2, 2), (1, 3)])
def test_positions_are_those_of_the_held_out_sequences_on_every_layout(ranks, parts):
    """A part, or a whole sequence, may have no target: its positions are not those of padding."""
    shape, found = BatchConfig(sequences=8, microbatch=2, length=4), 0
    for rank, part in product(range(ranks), range(parts)):
        data = Masked()
        data.prepare(length=4, seed=1, train=1, validation=10, fingerprint="masked")
        shards = {"shard": Shard(rank, ranks), "part": Shard(part, parts)}
        fed = DataFeed(
            data, data, shape, EvaluationConfig(sequences=16), device=torch.device("cpu"), **shards
        )
        found += sum(positions for _, positions in fed.validation())
    assert found == 10 * 4


def test_tokens_are_counted_as_they_were_trained_on(tmp_path):
    case = Case("optimizer", use="sgd")
    keys = {"checkpoint": {"use": "simple"}, "monitor": [{"use": "jsonl"}]}
    for steps, sequences, resume in ((2, 8, None), (4, 4, "latest")):
        batch = {"sequences": sequences, "microbatch": 1}
        changes = {"run": {"steps": steps}, "batch": batch, **keys}
        engine = make_engine(case, changes, folder=tmp_path, resume=resume)
        engine.fit()
    length = engine.run.feed.batch.length
    assert [row["tokens"] / length for row in metrics(tmp_path)] == [8, 16, 20, 24]
    assert metrics(tmp_path, "end")[-1]["tokens"] == 24 * length


class Shaped(Numbers):
    def __init__(self, batch):
        self.batch = batch

    def train_batch(self, sequences, shard):
        return self.batch

    def validation_batch(self, index, sequences, shard):
        return self.batch


ROWS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (Batch(ROWS[:1], ROWS[:1]), "tokens torch.int64 [1, 3]"),
        (Batch(torch.cat([ROWS, ROWS]), torch.cat([ROWS, ROWS])), "tokens torch.int64 [4, 3]"),
        (Batch(ROWS, ROWS[:, 1:]), "targets torch.int64 [2, 2]"),
        (Batch(ROWS, ROWS.int()), "targets torch.int32 [2, 3]"),
        (Batch(ROWS), "targets of NoneType in a Batch"),
        (Batch(ROWS.numpy(), ROWS.numpy()), "tokens of ndarray"),
        ((ROWS, ROWS), "tokens of NoneType in a tuple"),
    ],
    ids=["short", "all_ranks", "narrow", "int32", "targets", "numpy", "tuple"],
)
def test_rows_that_are_not_this_ranks_are_refused(batch, found):
    """A rank that got too few trained on fewer tokens, and one that got all ranks' on the first of them."""
    shape = BatchConfig(sequences=4, microbatch=2, length=3)
    data = Shaped(batch)
    fed = DataFeed(data, data, shape, EvaluationConfig(), Shard(1, 2), torch.device("cpu"))
    for what, ask in (
        ("train_batch", fed.microbatches),
        ("validation_batch", lambda: list(fed.validation())),
    ):
        with pytest.raises(PluginError) as error:
            ask()
        assert str(error.value).startswith(f"Shaped.{what} returned {found}")
        assert str(error.value).endswith("expected a Batch of torch.int64 [2, 3], this rank's rows")


def test_going_on_with_the_same_batches_leaves_the_same_bytes():
    """A resume in a phase that changes the batch takes it up once more."""
    fed = feed(8)
    take(fed, 2)
    batch = attrs.evolve(fed.batch, sequences=4)
    fed.resize(batch, fed.batch)
    take(fed, 1)
    for _ in range(2):
        again = feed(8, before=fed)
        again.resize(batch, again.batch)
        assert again.meta() == fed.meta()
        fed = again


class Ordered(SequenceData):
    """Data with numbers for sequences."""

    bytes_per_token, loss_counts, vocab_size = None, None, 1000

    def read_sequences(self, numbers, *, validation):
        return np.asarray(numbers)[:, None].repeat(2, 1)


class Counting(Ordered):
    """Keeps more than a position, as a mixture of sources does."""

    seen = 0

    def train_batch(self, sequences, shard):
        self.seen += sequences
        return super().train_batch(sequences, shard)


class Told(Counting):
    """And says what to do with it where data is left out."""

    def skip(self, sequences):
        super().skip(sequences)
        self.seen += sequences


@pytest.mark.parametrize("kind", [Ordered, Counting, Told])
def test_what_is_left_out_moves_all_of_the_datas_state(kind):
    """An inherited skip knew nothing of what a train_batch of one's own counts."""
    data = kind()
    data.prepare(length=1, seed=1, train=100, validation=0, fingerprint="numbers")
    shape = BatchConfig(sequences=4, microbatch=4, length=1)
    fed = DataFeed(data, data, shape, EvaluationConfig(), Shard(0, 1), torch.device("cpu"))
    fed.skipped = [(4, 16)]
    fed.microbatches(), fed.microbatches()
    assert (fed.taken, data.position) == (20, 20)
    assert kind is Ordered or data.seen == 20


@pytest.mark.parametrize("position", [{"web": 24, "code": 0}, [3, 4], "page 7"])
def test_a_components_own_position_may_be_anything(position):
    own = {"position": position, "taken": 8, "tokens": 8, "skipped": [], "batch_sizes": [[0, 8]]}
    meta = {"step": 1, "recipe": "", "data": own, "model": {}, "optimizer": {}, "loss_scale": {}}
    assert not state_problems(meta)
    for wrong in ({"position": -1}, {"position": None}, {"length": -1}, {"tokens": True}):
        assert state_problems({**meta, "data": {**own, **wrong}}), wrong


class BreaksOff(Monitor):
    """Ends a call of fit within its third step, once."""

    armed = True

    def on_before_update(self, update):
        if update.step == 3 and self.armed:
            self.armed = False
            raise KeyboardInterrupt


def test_a_step_that_was_broken_off_is_left_out_and_the_run_can_be_resumed(tmp_path):
    """As in a notebook: its batch had been counted as a step more, and later checkpoints were refused."""
    case, changes = Case("schedule", use="accumulate"), {"run": {"steps": 6}, "checkpoint": {"every": 2}}
    engine = make_engine(case, changes, folder=tmp_path, callbacks=[BreaksOff()])
    with pytest.raises(KeyboardInterrupt):
        engine.fit()
    engine.fit()
    meta, size = engine.run.feed.meta(), engine.run.feed.batch.sequences
    assert (meta["taken"], meta["skipped"]) == (7 * size, [[2 * size, 3 * size]])
    assert meta["tokens"] == 6 * engine.run.feed.tokens_per_step
    again = make_engine(case, {"run": {"steps": 8}}, folder=tmp_path, resume="auto")
    assert again.fit().step == 8
