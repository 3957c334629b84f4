"""Which sequences a run has taken, whatever batches it was resumed with."""

import json

import pytest
import torch
from test_run import metrics

from nanotrain_core.batch import Batch, Shard
from nanotrain_core.feed import DataFeed
from nanotrain_core.recipe.tree import BatchConfig, EvaluationConfig
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


def test_a_checkpoint_from_before_sizes_were_kept_is_taken_to_have_had_this_one():
    old = feed(8)
    take(old, 3)
    meta = {key: value for key, value in old.meta().items() if key not in ("batch_sizes", "tokens")}
    fed = feed(8)
    fed.load_meta(meta)
    assert (fed.of_last(2), fed.tokens) == ((8, 24), 24)


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
