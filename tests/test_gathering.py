"""Weights of ranges are gathered when they are written, and never by nobody."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from nanotrain_core.compose import check_ranges
from nanotrain_core.contracts import StepStats
from nanotrain_core.errors import PluginError
from nanotrain_core.layout.placement import Piece
from nanotrain_core.optim.gathering import GatheringOptimizer


@pytest.mark.parametrize(
    ("early", "expected"),
    [
        (True, ["setup", "own wait", "gather", "wait", "wait", "step", "own wait", "gather"]),
        (False, ["setup", "gather", "wait", "wait", "step", "gather"]),
    ],
)
def test_an_optimizer_that_returns_early_is_waited_for_before_its_weights_are_gathered(early, expected):
    calls = []

    def note(what, result=None):
        return lambda *_, **__: calls.append(what) or result

    behind = SimpleNamespace(
        returns_early=early,
        setup=note("setup"),
        step=note("step", StepStats(1.0, skipped=False)),
        wait=note("own wait"),
    )
    made = GatheringOptimizer(behind, SimpleNamespace(gather_weights=note("gather"), wait=note("wait")))
    made.setup([], None, None, mock.Mock(device_is_async=False))
    made.step()
    assert calls == expected


class Ranges:
    """A gradient sync that hands out half of a weight, or all of it, and gathers nothing."""

    def __init__(self, span):
        self.span = span

    def pieces(self):
        placement = SimpleNamespace(name="embed.weight")
        return [Piece(nn.Parameter(torch.zeros(8)), placement, self.span)]


class Gathered(Ranges):
    def gather_weights(self):
        """Not called."""

    def wait(self, parameters):
        """Not called."""


def test_ranges_that_nobody_gathers_are_refused_by_the_name_of_the_sync():
    recipe = SimpleNamespace(parallel=[SimpleNamespace(kind="parallel", use="halves")])
    registry = mock.Mock(get=lambda *_: SimpleNamespace(provides={"gradient_sync"}))
    with pytest.raises(PluginError, match=r"'halves' .* embed.weight\[0:4\], .* gather_weights\(\) and wait"):
        check_ranges(Ranges((0, 4)), mock.Mock(), recipe, registry)
    own = Ranges((0, 4))
    for gradients, optimizer in ((Ranges(None), mock.Mock()), (Gathered((0, 4)), mock.Mock()), (own, own)):
        check_ranges(gradients, optimizer, recipe, registry)
