"""Mixture of experts: what the ``moe`` monitor publishes of each router."""

from nanotrain_core.api import Metric, Rule
from nanotrain_health.catalogue.common import ratio

BALANCE = "raise bias_update_rate or the balance loss"

EXPERTS = (
    ratio(
        name="moe/max_load/{router}",
        group="moe",
        reduce="max",
        cost="device",
        summary="tokens of a layer's busiest expert over the mean of its experts",
        rule=Rule(
            warn_above=10,
            bad_above=30,
            high="one expert of {where} gets {value} times its share of tokens: ranks wait for it; "
            f"{BALANCE}",
        ),
    ),
    ratio(
        name="moe/min_load/{router}",
        group="moe",
        reduce="max",
        cost="device",
        summary="tokens of a layer's least used expert over the mean",
    ),
    ratio(
        name="moe/entropy/{router}",
        group="moe",
        reduce="max",
        cost="device",
        summary="entropy of the load over that of a balanced load: from 0 to 1",
    ),
    Metric(
        name="moe/starved/{router}",
        unit="experts",
        group="moe",
        reduce="max",
        cost="device",
        summary="experts with less than 2% of the mean number of tokens, over the last logged steps, once "
        "10 are known",
        rule=Rule(
            warn_above=0,
            high=f"{{value}} experts of {{where}} starve: tokens hardly reach them, so they learn nothing; "
            f"{BALANCE}",
        ),
    ),
    ratio(
        name="moe/balance/{router}",
        group="moe",
        reduce="max",
        cost="device",
        summary="entropy of the load of the last logged steps over that of a balanced load: from 0 to 1",
        rule=Rule(
            warn_below=0.3,
            bad_below=0.15,
            low="routing of {where} has collapsed on few experts (entropy {value} of what is possible): "
            f"lower lr, or {BALANCE}",
        ),
    ),
    Metric(
        name="moe/empty/{router}",
        unit="experts",
        group="moe",
        reduce="max",
        cost="device",
        summary="experts that received no token in the step",
    ),
    ratio(
        name="moe/bias_norm/{router}",
        group="moe",
        reduce="max",
        cost="device",
        summary="2-norm of the bias that balances the load",
    ),
    Metric(
        name="moe/all_to_all_bytes/{experts}",
        unit="bytes",
        group="moe",
        reduce="sum",
        summary="sent to experts on other ranks and back in the steps since the last logged one, over all "
        "ranks, backward included and evaluations not",
    ),
    Metric(
        name="moe/load/{router}",
        unit="tokens",
        group="moe",
        kind="histogram",
        level="debug",
        cost="device",
        summary="tokens of each expert of a layer: bin n is expert n",
    ),
)
