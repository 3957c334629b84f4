"""A method of a component that returns something else, such as None for lack of a return, is named."""

from unittest import mock

import pytest

from nanotrain_core.checkpoint.simple import SimpleCheckpoint
from nanotrain_core.contracts import Parallel
from nanotrain_core.errors import PluginError
from nanotrain_core.layout.grid import Grid
from nanotrain_core.models.kernels import TorchKernels
from nanotrain_core.optim.adamw import AdamW
from nanotrain_core.precision.uniform import Uniform
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine


@pytest.mark.parametrize(
    ("owner", "method", "returned", "told"),
    [
        (Grid, "layout", None, r"topology 'grid': its layout returned None; expected Layout"),
        (TorchKernels, "ops", None, r"kernels 'torch': its ops returned None; expected Ops"),
        (Parallel, "around", None, r"parallel 'recompute': its around returned None; expected Mapping"),
        (Uniform, "describe", None, r"precision 'fp64': its describe returned None; expected Sequence"),
        (Uniform, "describe", "double", r"precision 'fp64': its describe returned a str; expected Sequence"),
        (AdamW, "blocks", None, r"optimizer AdamW: its blocks returned None; expected Iterable"),
        (SimpleCheckpoint, "advance", None, r"checkpoint SimpleCheckpoint: its advance returned None"),
    ],
    ids=["layout", "ops", "around", "describe", "text", "blocks", "advance"],
)
def test_what_a_method_returned_is_told(owner, method, returned, told, tmp_path):
    changes = {
        "run": {"steps": 1},
        "optimizer": {"use": "adamw"},
        "checkpoint": {"use": "simple"},
        "kernels": {"use": "torch"},
        "parallel": [{"use": "recompute"}],
    }
    with (
        mock.patch.object(owner, method, return_value=returned),
        pytest.raises(PluginError, match=told),
    ):
        make_engine(Case("schedule", use="accumulate"), changes, folder=tmp_path).fit()
