"""A model that breaks its contract is told so by name, and what it need not offer is not made up."""

from unittest import mock

import pytest
import torch
from torch import nn

from nanotrain_core.contracts import MasterWeight, Monitor, PartOutput
from nanotrain_core.errors import PluginError
from nanotrain_core.layout.buckets import BucketQueue
from nanotrain_core.layout.gradients import AllReduceGradients
from nanotrain_core.layout.roles import tag
from nanotrain_core.models.transformer import Transformer, TransformerPart
from nanotrain_core.moe import routing
from nanotrain_core.precision.uniform import Uniform
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
        (
            lambda found: PartOutput(None, {"lmm": found.losses["lm"]}),
            r"the model returned the loss 'lmm'; its loss_weights have lm \(did you mean 'lm'\?\)",
        ),
        (
            lambda found: PartOutput(None, [*found.losses.values()]),
            "stage 0 returned losses that are a list; expected a dict of each by its name",
        ),
        (
            lambda found: PartOutput(None, {"lm": found.losses["lm"].item()}),
            "stage 0 returned a float for the loss 'lm'; expected a tensor",
        ),
        (lambda found: PartOutput(None), "stage 0 returned no loss; expected sums by name"),
    ],
    ids=["tensor", "none", "of tokens", "unknown", "misspelt", "list", "number", "without any"],
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


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (torch.tensor(1), "loss_counts returned a Tensor; expected a mapping from each name in loss_weights"),
        ({"lmm": torch.tensor(1)}, r"loss_counts lack 'lm', .* \(did you mean 'lmm'\?\)"),
        ({"lm": torch.ones(4)}, r"loss_counts returned a tensor of shape \[4\] for 'lm'; expected a scalar"),
    ],
    ids=["tensor", "misspelt", "of each row"],
)
@pytest.mark.parametrize("changes", [{}, {"evaluation": {"every": 1, "sequences": 8}}])
def test_counts_that_are_something_else(counts, text, changes):
    """Also where the first batch that is counted is one of validation."""
    with (
        mock.patch.object(Transformer, "loss_counts", return_value=counts),
        pytest.raises(PluginError, match=text),
    ):
        train(ALONE, changes)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (1.0, r"model 'transformer': loss_weights is 1.0; expected the weight of each loss term"),
        ({}, r"loss_weights is {}; expected the weight of each loss term"),
    ],
)
def test_weights_of_no_loss(weights, text):
    found = mock.PropertyMock(return_value=weights)
    found.__set__ = lambda *_: None
    with (
        mock.patch.object(Transformer, "loss_weights", found, create=True),
        pytest.raises(PluginError, match=text),
    ):
        make_engine(ALONE, {})


def test_a_term_that_no_stage_returns():
    """It was shown as 0.0."""
    made = Transformer.__init__

    def weighed(model, config):
        made(model, config)
        model.loss_weights = {"lm": 1.0, "lmz": 0.1}

    expected = r"a weight for the loss 'lmz' and never returned that loss: .* had lm \(did you mean 'lm'\?\)"
    with (
        mock.patch.object(Transformer, "__init__", weighed),
        mock.patch.object(
            Transformer, "loss_counts", return_value=dict.fromkeys(("lm", "lmz"), torch.ones(()))
        ),
        pytest.raises(PluginError, match=expected),
    ):
        train(ALONE, {})


def test_a_term_may_be_absent_in_steps_where_its_count_is_0():
    """As of images, where the microbatches of a rank's first step may have none."""
    made, counted, calls = Transformer.__init__, Transformer.loss_counts, []

    def weighed(model, config):
        made(model, config)
        model.loss_weights = {"lm": 1.0, "image": 0.1}

    def count(model, batch):
        calls.append(batch)
        return {**counted(model, batch), "image": torch.tensor(float(len(calls) > 4))}

    def compute(part, *args):
        found = forward(part, *args)
        more = {"image": found.losses["lm"]} if len(calls) > 4 else {}
        return PartOutput(found.value, {**found.losses, **more})

    with (
        mock.patch.object(Transformer, "__init__", weighed),
        mock.patch.object(Transformer, "loss_counts", count),
        mock.patch.object(TransformerPart, "forward", compute),
    ):
        train(ALONE, {})
    assert len(calls) > 4


@pytest.mark.parametrize(
    ("method", "value", "text"),
    [
        ("pieces", None, "AllReduceGradients: pieces returned None; expected a list of the nanotrain_core"),
        ("gradient_of", None, "gradient_of returned a NoneType for .*; expected a tensor of the shape of"),
        ("gradient_of", torch.zeros(3), r"returned a tensor of shape \(3,\) for .* piece.weight, \("),
    ],
)
def test_a_gradient_sync_that_returns_something_else(method, value, text):
    with (
        mock.patch.object(AllReduceGradients, method, return_value=value),
        pytest.raises(PluginError, match=text),
    ):
        train(ALONE, {})


@pytest.mark.parametrize(
    ("method", "value", "text"),
    [
        (
            "convert",
            None,
            "the precision's convert returned a NoneType, which is no model part: return the part",
        ),
        ("master", None, r"precision: master returned None \(see nanotrain_core.api.torch.MasterWeight\)"),
        ("master", object(), r"derive from nanotrain_core.api.torch.MasterWeight: master returned a object"),
        (
            "master",
            type("Mine", (MasterWeight,), {"store": lambda self: None})(),
            r"Mine.store\(self\) cannot be called: .*; expected store\(self, value\); see .*precision.md",
        ),
    ],
    ids=["no part", "no master", "without base", "signature"],
)
def test_a_precision_that_returns_something_else(method, value, text):
    with mock.patch.object(Uniform, method, return_value=value), pytest.raises(PluginError, match=text):
        train(ALONE, {})


def test_a_queue_of_lists_is_refused():
    with pytest.raises(PluginError, match="BucketQueue: a bucket is a list; expected hashable objects that"):
        BucketQueue([[nn.Parameter(torch.zeros(1))]])


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
