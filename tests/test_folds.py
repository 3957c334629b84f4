"""Expert parallelism passes every check of the harness beside the other plugins, with DeepSeek models."""

import pytest
from nanotrain_deepseek.samples import V2, V3

from nanotrain_core.testing import Case, conformance

EP, DDP = {"use": "ep_deepseek"}, {"use": "ddp"}
TP, REPLICATED_TP = {"use": "tp"}, {"use": "tp", "sequence_parallel": False}


def composed(name, *wrappers, model=V3, schedule="accumulate", **topology):
    """Return ep_deepseek among other wrappers, in that order, with a small DeepSeek."""
    overrides = {
        "model": {"use": "deepseek", **model},
        "parallel": list(wrappers),
        "schedule": {"use": schedule},
    }
    return Case("parallel", use="ep_deepseek", topology=topology, overrides=overrides, name=name)


test_exhaustively = pytest.mark.full(
    conformance(
        composed("v3-ep2-etp2", EP, DDP, dp=4, ep=2, etp=2),
        composed("v2-ep4", EP, DDP, model=V2, dp=4, ep=4),
        *(
            composed(f"{order}-{'-'.join(f'{d}{n}' for d, n in fold.items())}", *wrappers, dp=2, tp=2, **fold)
            for fold in ({"ep": 4}, {"ep": 2}, {"etp": 2}, {"ep": 2, "etp": 2})
            for order, wrappers in {
                "sp-first": (TP, EP, DDP),
                "sp-last": (DDP, EP, TP),
                "tp-first": (REPLICATED_TP, EP, DDP),
                "tp-last": (DDP, EP, REPLICATED_TP),
            }.items()
        ),
        composed("1f1b-ep2", EP, DDP, schedule="1f1b", dp=2, pp=2, ep=2),
        composed("zb_h1-tp2-ep2", TP, EP, DDP, schedule="zb_h1", pp=2, tp=2, ep=2),
    )
)
