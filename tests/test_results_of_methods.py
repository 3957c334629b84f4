"""A method of a component that returns something else, such as None for lack of a return, is named."""

from unittest import mock

import numpy as np
import pytest

from nanotrain_core.checkpoint.saver import steps_of
from nanotrain_core.checkpoint.simple import SimpleCheckpoint
from nanotrain_core.contracts import Parallel
from nanotrain_core.data.synthetic import Synthetic
from nanotrain_core.errors import PluginError
from nanotrain_core.layout.grid import Grid
from nanotrain_core.models.kernels import TorchKernels
from nanotrain_core.monitors.guard import Guard
from nanotrain_core.optim.adamw import AdamW
from nanotrain_core.precision.uniform import Uniform
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine


@pytest.mark.parametrize(
    ("owner", "method", "returned", "told"),
    [
        (Grid, "layout", None, r"topology 'grid': its layout returned None; expected Layout"),
        (TorchKernels, "ops", None, r"kernels 'torch': its ops returned None; expected Ops"),
        (
            Parallel,
            "op_wrappers",
            None,
            r"parallel 'recompute': its op_wrappers returned None; expected Mapping",
        ),
        (Uniform, "describe", None, r"precision 'fp64': its describe returned None; expected Sequence"),
        (Uniform, "describe", "double", r"precision 'fp64': its describe returned a str; expected Sequence"),
        (Uniform, "packing", True, r"precision 'fp64': its packing returned a bool; expected Packing"),
        (AdamW, "blocks", None, r"optimizer AdamW: its blocks returned None; expected Iterable"),
        (AdamW, "make", None, r"optimizer AdamW: its make returned None; expected Optimizer"),
        (AdamW, "options", None, r"optimizer AdamW: its options returned None; expected Mapping"),
        (SimpleCheckpoint, "advance", None, r"checkpoint SimpleCheckpoint: its advance returned None"),
        (
            TorchKernels,
            "transport",
            None,
            r"kernels 'torch': its transport returned None; expected Trans",
        ),
        (
            Synthetic,
            "read_sequences",
            None,
            r"data Synthetic: its read_sequences returned None; expected int",
        ),
        (
            Synthetic,
            "read_sequences",
            np.zeros((8, 17)),
            r"returned float64 \[8, 17\]; expected int",
        ),
        (Guard, "suspect_steps", None, r"monitor Guard: its suspect_steps returned None; expected int"),
    ],
)
def test_what_a_method_returned_is_told(owner, method, returned, told, tmp_path):
    changes = {
        "run": {"steps": 1},
        "optimizer": {"use": "adamw"},
        "checkpoint": {"use": "simple"},
        "kernels": {"use": "torch"},
        "parallel": [{"use": "recompute"}],
        "monitor": [{"use": "guard"}],
    }
    with (
        mock.patch.object(owner, method, return_value=returned),
        pytest.raises(PluginError, match=told),
    ):
        make_engine(Case("schedule", use="accumulate"), changes, folder=tmp_path).fit()


def test_steps_that_a_checkpoint_does_not_list_are_told():
    """They are asked for after a restart, and before a rollback."""
    checkpoint = mock.Mock(spec=SimpleCheckpoint)
    checkpoint.steps.return_value = None
    with pytest.raises(PluginError, match="its steps returned None; expected Iterable"):
        steps_of(checkpoint)
