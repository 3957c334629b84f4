"""A model that breaks its contract is told so by name, and what it need not offer is not made up."""

from unittest import mock

import pytest
import torch
from torch import nn

from nanotrain_core.contracts import Monitor, PartOutput
from nanotrain_core.errors import PluginError
from nanotrain_core.layout.roles import tag
from nanotrain_core.models.transformer import Transformer, TransformerPart
from nanotrain_core.moe import routing
from nanotrain_core.testing import Case
from nanotrain_core.testing.components.moe_model import Router
from nanotrain_core.testing.probe import make_engine, train, weights

ALONE = Case("schedule", use="accumulate")
forward = TransformerPart.forward


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            lambda found: found.losses["lm"],
            r"stage 0 returned a Tensor; expected PartOutput\(value, losses\)",
        ),
        (lambda found: None, "stage 0 returned a NoneType; expected PartOutput"),
        (
            lambda found: PartOutput(None, {"lm": found.losses["lm"].expand(2, 1)}),
            "stage 0 returned several numbers for the loss 'lm'; expected one, their sum",
        ),
        (
            lambda found: PartOutput(None, {**found.losses, "z": found.losses["lm"]}),
            "the model returned the loss 'z'; its loss_weights have lm",
        ),
    ],
    ids=["tensor", "none", "of tokens", "unknown"],
)
def test_a_part_that_returns_something_else(wrong, text):
    with (
        mock.patch.object(TransformerPart, "forward", lambda part, *args: wrong(forward(part, *args))),
        pytest.raises(PluginError, match=text),
    ):
        train(ALONE, {})


def test_a_term_that_is_not_counted():
    with (
        mock.patch.object(Transformer, "loss_counts", return_value={"loss": torch.tensor(1)}),
        pytest.raises(PluginError, match="loss_counts lack 'lm', which loss_weights have"),
    ):
        train(ALONE, {})


def test_a_tag_that_is_no_role_is_refused():
    """No wrapper would ever have seen it: the layer stayed whole without a word."""
    with pytest.raises(PluginError, match="Linear is tagged 'column'; expected a Role, one of VOCAB, "):
        tag(nn.Linear(2, 2), "column")


def test_a_router_that_does_not_count_reports_no_load(monkeypatch):
    """It was shown as 0.00, as if no expert had got a token."""
    assert issubclass(Router, routing.CountingRouter)
    monkeypatch.setattr(routing, "CountingRouter", nn.Identity)  # so that the one it has is none
    found = train(Case("model", use="routed"), {"run": {"steps": 1}})
    assert [report.expert_load for report in found.reports] == [None]


class Asks(Monitor):
    """Has the model compute logits after every step."""

    def on_start(self, run):
        self.run = run

    def on_step(self, report):
        self.run.logits(torch.arange(16).expand(4, 16))


@pytest.mark.parametrize(
    ("changes", "monitors"),
    [({"evaluation": {"every": 1, "sequences": 8}}, []), ({"evaluation": {"sequences": 0}}, [Asks()])],
    ids=["evaluation", "logits"],
)
def test_routers_count_training_tokens_only(changes, monitors):
    """This model counts in every pass: validation tokens moved the biases that balance the experts."""

    def trained(changes, monitors=()):
        engine = make_engine(
            Case("model", use="routed"), {"run": {"steps": 3}, **changes}, callbacks=monitors
        )
        engine.fit()
        return {each.name: each.tensor for each in weights(engine.run)}

    expected, found = trained({"evaluation": {"sequences": 0}}), trained(changes, monitors)
    assert [tensor.any() for name, tensor in expected.items() if "router.bias" in name] == [True, True]
    assert all(torch.equal(expected[name], found[name]) for name in expected)
