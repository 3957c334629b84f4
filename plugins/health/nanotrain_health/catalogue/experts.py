"""Mixture of experts: what the ``moe`` monitor publishes of each router."""

from functools import partial

from nanotrain_core.api import Metric, Rule
from nanotrain_health.catalogue.common import ratio

#: Of each router.
of_router = partial(ratio, group="moe", reduce="max", cost="device")

BALANCE = "raise bias_update_rate or the balance loss"

EXPERTS = (
    of_router(
        name="moe/max_load/{router}",
        summary="tokens of a layer's busiest expert over the mean of its experts",
        rule=Rule(
            warn_above=10,
            bad_above=30,
            high="one expert of {where} gets {value} times its share of tokens: ranks wait for it; "
            f"{BALANCE}",
        ),
    ),
    of_router(name="moe/min_load/{router}", summary="tokens of a layer's least used expert over the mean"),
    of_router(
        name="moe/entropy/{router}",
        summary="entropy of the load over that of a balanced load: from 0 to 1",
    ),
    of_router(
        name="moe/starved/{router}",
        unit="experts",
        summary="experts with less than 2% of the mean number of tokens, over the last logged steps, once "
        "10 are known",
        rule=Rule(
            warn_above=0,
            high=f"{{value}} experts of {{where}} starve: tokens hardly reach them, so they learn nothing; "
            f"{BALANCE}",
        ),
    ),
    of_router(
        name="moe/balance/{router}",
        summary="entropy of the load of the last logged steps over that of a balanced load: from 0 to 1",
        rule=Rule(
            warn_below=0.3,
            bad_below=0.15,
            low="routing of {where} has collapsed on few experts (entropy {value} of what is possible): "
            f"lower lr, or {BALANCE}",
        ),
    ),
    of_router(
        name="moe/empty/{router}",
        unit="experts",
        summary="experts that received no token in the step",
    ),
    of_router(name="moe/bias_norm/{router}", summary="2-norm of the bias that balances the load"),
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
