"""What is suggested for a path that is no run, and has no weights."""

from pathlib import Path

import pytest

from nanotrain_core.run.suggest_run import did_you_mean_run, did_you_mean_weights


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("laptop.out", "weights-hf", "recipe.toml", "runs/laptop/metrics.jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("runs/laptop/checkpoints/step-00000320").mkdir(parents=True)


@pytest.mark.parametrize(
    ("path", "run", "weights"),
    [
        ("laptop", "runs/laptop", "runs/laptop"),
        ("laptp", "runs/laptop", "runs/laptop"),
        ("runs/laptpo", "runs/laptop", "runs/laptop"),
        ("runs/laptop/metrics", "runs/laptop", "metrics.jsonl"),
        ("runs/laptop/checkpoints/step-00000032", "runs/laptop", "step-00000320"),
        ("weights-h", None, "weights-hf"),
        ("zzz", None, None),
    ],
)
def test_a_run_is_nearer_than_what_else_has_a_like_name(folder, path, run, weights):
    for find, meant in ((did_you_mean_run, run), (did_you_mean_weights, weights)):
        assert find(Path(path)) == (f" (did you mean '{meant}'?)" if meant else "")
