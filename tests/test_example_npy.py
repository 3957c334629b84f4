"""The example ``npy``: tokens of a NumPy file as data."""

import numpy as np
import pytest
from examples_of_plugins import example
from test_docs import failed

from nanotrain_core.errors import DataError
from nanotrain_core.testing.probe import make_engine


def tokens_in(path, tokens):
    np.save(path, tokens)
    around = {"batch": {"length": 16}}
    return example("data", "npy", config={"path": str(path), "vocab": 64}, overrides=around)


@pytest.mark.full
def test_tokens_of_a_file_pass_every_check(tmp_path):
    rng = np.random.default_rng(3)
    assert failed(tokens_in(tmp_path / "tokens.npy", rng.integers(0, 64, 3000, dtype=np.uint16))) == {}


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (
            np.zeros((2, 3), dtype=np.int64),
            "expected whole numbers in one dimension, got int64 of shape (2, 3)",
        ),
        (np.zeros(300), "expected whole numbers in one dimension, got float64 of shape (300,)"),
        (np.full(3000, 64), "token 64; expected 0 to 63"),
        (None, "there is no file"),
    ],
)
def test_a_file_that_has_no_tokens_is_refused(tmp_path, tokens, told):
    case = tokens_in(tmp_path / "tokens.npy", np.zeros(3) if tokens is None else tokens)
    if tokens is None:
        (tmp_path / "tokens.npy").unlink()
    with pytest.raises(DataError) as caught:
        make_engine(case, {}).fit()
    assert told in str(caught.value)


# That it trains as one process does, with everything else, is in the composition matrix.
