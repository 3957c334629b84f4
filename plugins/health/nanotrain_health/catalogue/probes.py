"""What the ``probes`` monitor publishes."""

from nanotrain_core.api import Metric, Rule
from nanotrain_health.catalogue.common import ratio

PROBES = (
    Metric(
        name="probes/batch",
        unit="",
        group="probes",
        kind="text",
        summary="hash of the fixed batch: only runs with the same one compare",
    ),
    Metric(
        name="probes/loss",
        unit="nats",
        group="probes",
        reduce="last",
        cost="weights",
        summary="mean next-token loss on the fixed batch",
    ),
    Metric(
        name="probes/entropy",
        unit="nats",
        group="probes",
        reduce="last",
        cost="weights",
        summary="mean entropy of what the model predicts",
    ),
    ratio(
        name="probes/top_mass",
        group="probes",
        reduce="last",
        cost="weights",
        summary="mean probability of the likeliest tokens together",
    ),
    Metric(
        name="probes/kl",
        unit="nats",
        group="probes",
        reduce="last",
        cost="weights",
        summary="mean KL divergence of what it predicts from what it predicted at the last probe",
    ),
    ratio(
        name="probes/leak",
        group="probes",
        reduce="last",
        cost="weights",
        summary="by how much logits of a sequence's first half change with the tokens of its second half, "
        "over their size: 0 of a causal model",
        rule=Rule(
            warn_above=0.002,
            bad_above=0.01,
            high="the model sees the future: predictions change by {percent} with tokens that come later, so "
            "the loss means nothing; check the attention mask",
        ),
    ),
    ratio(
        name="probes/shifted",
        group="probes",
        reduce="last",
        summary="share of the targets that are the token after their input",
        rule=Rule(
            bad_below=0.9,
            low="only {percent} of the targets are the next token: inputs and targets are not shifted by "
            "one; check the data",
        ),
    ),
)
