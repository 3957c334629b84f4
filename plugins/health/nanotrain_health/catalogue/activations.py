"""Attention and the residual stream, at monitored layers."""

from functools import partial

from nanotrain_core.api import Rule
from nanotrain_health.catalogue.common import at_layers

of_attention = partial(at_layers, group="attention")
of_residual = partial(at_layers, group="residual stream")

ATTENTION = (
    of_attention(
        name="attention/max_logit/{block}",
        reduce="max",
        summary="largest logit before softmax, over a sample of queries of all heads and sequences",
        rule=Rule(
            warn_above=200,
            bad_above=1000,
            high="attention logits of {where} reach {value}: attention is about to collapse on one token; "
            "normalize queries and keys, or lower lr",
        ),
    ),
    of_attention(
        name="attention/entropy/{block}",
        unit="nats",
        summary="entropy of attention over the tokens a query sees, mean over these queries and heads",
    ),
    of_attention(
        name="attention/entropy_ratio/{block}",
        summary="attention/entropy over the entropy of uniform attention to all of these tokens: from 0 to 1",
        rule=Rule(
            warn_below=0.1,
            bad_below=0.02,
            low="attention of {where} has collapsed: each query sees about one token (entropy {value} of "
            "what is possible); lower lr, or normalize queries and keys",
        ),
    ),
)

RESIDUAL = (
    of_residual(
        name="residual/rms/{block}",
        summary="root mean square of a layer's output",
        rule=Rule(
            warn_times=2,
            high="the residual stream of {where} is {times} times as large as it was: activations grow; "
            "lower lr, or raise weight decay",
        ),
    ),
    of_residual(
        name="residual/max_abs/{block}",
        summary="largest magnitude of a layer's output",
        reduce="max",
    ),
    of_residual(
        name="residual/outliers/{block}",
        summary="fraction of a layer's output elements beyond 10 times the root mean square of their token",
        rule=Rule(
            warn_above=1e-3,
            bad_above=1e-2,
            high="{percent} of the residual stream of {where} are outliers: low precision will lose the "
            "rest; lower lr, or keep these layers in bf16",
        ),
    ),
    of_residual(
        name="norms/rms/{norm}",
        summary="root mean square of a norm's output",
        rule=Rule(
            warn_below=0.5,
            bad_below=0.25,
            warn_above=2,
            bad_above=4,
            low="{where} returns activations of size {value}, not about 1: its weight has shrunk; check "
            "weight decay on norms",
            high="{where} returns activations of size {value}, not about 1: its weight has grown; lower lr",
        ),
    ),
    of_residual(
        name="norms/max_abs/{norm}",
        summary="largest magnitude of a norm's output",
        reduce="max",
        rule=Rule(
            warn_above=20,
            bad_above=50,
            high="{where} returns activations as large as {value}: a few features dominate; low precision "
            "will suffer",
        ),
    ),
)
