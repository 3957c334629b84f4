"""A run whose tensor-parallel ranks have shares of different sizes is saved, and read on any layout."""

import pytest

from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.compare import assert_bitwise, whole
from nanotrain_core.testing.probe import train

#: Of two tensor-parallel ranks one has 17 rows of the vocabulary, the other 18, and both have all norms.
#: Buckets end within a norm. GPT-2's 50,257 rows divide no better.
UNEVEN = {"layers": 1, "width": 96, "heads": 4, "head_size": 4, "ffn": 16, "vocab": 35}
ADAMW = {"use": "adamw", "lr": 0.01, "clip_norm": 0.5}
ZERO = {**ADAMW, "use": "zero12", "bucket_mb": 0.006}


def on(degrees, optimizer):
    overrides = {
        "model": UNEVEN,
        "data": {"vocab": 35},
        "parallel": [{"use": "tp", "sequence_parallel": False}],
        "optimizer": optimizer,
    }
    return Case("topology", use="grid", topology=degrees, overrides=overrides)


def after_two_steps(case, kind, folder, **options):
    changes = {"run": {"steps": 2}, "checkpoint": {"use": kind}}
    traces = run_ranks(train, case.world_size, case, changes, folder=folder, **options)
    return {**whole([t.weights for t in traces], atol=0.0), **whole([t.state for t in traces], atol=0.0)}


@pytest.mark.full_cases("simple-1")
@pytest.mark.parametrize(("kind", "stage"), [("simple", 1), ("sharded_v2", 2)])
def test_a_run_with_an_uneven_vocabulary_is_saved_and_read_on_other_layouts(kind, stage, tmp_path):
    source = on({"tp": 2, "dp": 2}, {**ZERO, "stage": stage})
    saved = after_two_steps(source, kind, tmp_path, save_at=2)
    for target in (on({}, ADAMW), on({"tp": 4}, {**ZERO, "stage": 3 - stage})):
        read = after_two_steps(target, kind, tmp_path, resume="2")
        assert_bitwise(read, saved, f"read on {target.world_size} ranks")
