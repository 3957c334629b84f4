"""What the ``probes`` monitor publishes."""

from functools import partial

from nanotrain_core.api import Metric, Rule
from nanotrain_health.catalogue.common import ratio

#: Of predictions on the fixed batch.
of_batch = partial(ratio, group="probes", reduce="last", cost="weights")

PROBES = (
    Metric(
        name="probes/batch",
        unit="",
        group="probes",
        kind="text",
        summary="hash of the fixed batch: only runs with the same hash are comparable",
    ),
    of_batch(name="probes/loss", unit="nats", summary="mean next-token loss on the fixed batch"),
    of_batch(name="probes/entropy", unit="nats", summary="mean entropy of the model's predictions"),
    of_batch(name="probes/top_mass", summary="mean total probability of the most probable tokens"),
    of_batch(
        name="probes/kl",
        unit="nats",
        summary="mean KL divergence of predictions from those at the last probe",
    ),
    of_batch(
        name="probes/leak",
        summary="change of a sequence's first-half logits with the tokens of its second half, "
        "over their size: 0 for a causal model",
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
        summary="fraction of the targets that are the token after their input",
        rule=Rule(
            bad_below=0.9,
            low="only {percent} of the targets are the next token: inputs and targets are not shifted by "
            "one; check the data",
        ),
    ),
)
