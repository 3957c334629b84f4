"""``lora`` on every layout trains the adapters of one process, beside a model that stays as it was."""

import attrs
import pytest
from as_one_process import assert_trains_as_one_process
from compositions import OPTIMIZERS, Composition, compiled

PLAIN = Composition(
    model="transformer",
    tp=1,
    pp=1,
    dp=1,
    ep=1,
    etp=1,
    schedule="accumulate",
    sp=False,
    tied=False,
    microbatch=3,
    experts_first=False,
    zero=0,
)
LORA = {"use": "lora", "rank": 4, "alpha": 32.0}

#: One layout of each kind in the first tier.
FIRST = [{"tp": 2, "sp": True, "dp": 2}]
LAYOUTS = [
    {"dp": 2},
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 2, "recompute": True},
    {"tp": 2},
    {"tp": 2, "sp": True, "recompute": True},
    {"tp": 4, "sp": True},  # ranks use copies of key and value heads
    {"tp": 4},
    {"pp": 2, "schedule": "1f1b", "tied": True},
    {"pp": 2, "schedule": "zb_h1", "tp": 2, "sp": True},
    {"pp": 2, "schedule": "interleaved_1f1b", "dp": 2, "zero": 2},
    {"pp": 2, "schedule": "dualpipe_v", "recompute": True},
    {"cp": 2},
    {"cp": 2, "tp": 2, "sp": True, "communication": "ring", "zero": 1},
    *(
        {"model": model, **layout}
        for model in ("moe", "deepseek_v3", "deepseek_v2")
        for layout in (
            {"dp": 2, "ep": 2},
            {"tp": 2, "ep": 2, "sp": True},
            {"tp": 2, "dp": 2, "ep": 2, "zero": 1},
        )
    ),
    {"model": "deepseek_v3", "tp": 2, "pp": 2, "ep": 2, "schedule": "1f1b"},
]


def with_lora(composition, config=None, *more):
    """Return a composition as a case, in which adapters come after all that split layers."""
    case = composition.case()
    wrappers = list(case.overrides["parallel"])
    at = len(wrappers) - (wrappers[-1]["use"] == "ddp")
    wrappers[at:at] = [{**LORA, **(config or {})}, *more]
    optimizer = composition.optimizers()["adamw"]
    overrides = {**case.overrides, "parallel": wrappers, "optimizer": optimizer}
    return attrs.evolve(case, overrides=overrides, name=f"lora-{composition.id}")


def one_process(case):
    """Return the run that it must equal: its optimizer shards nothing."""
    return attrs.evolve(case.alone(), overrides={**case.overrides, "optimizer": OPTIMIZERS["adamw"]})


def layouts():
    for layout in (*FIRST, *LAYOUTS):
        composition = attrs.evolve(PLAIN, **layout)
        yield pytest.param(composition, id=composition.id, marks=() if layout in FIRST else pytest.mark.full)


@pytest.mark.parametrize("composition", [*layouts()])
def test_adapters_train_as_in_one_process(composition):
    case = with_lora(composition)
    assert_trains_as_one_process(case, one_process(case))


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "sp": True, "recompute": True}, {"pp": 2, "dp": 2, "schedule": "1f1b", "zero": 2}],
    ids=["tp", "pp"],
)
def test_compiled_layers_train_adapters_as_eager_ones(layout):
    case = with_lora(attrs.evolve(PLAIN, **{"microbatch": 6, **layout}))
    assert_trains_as_one_process(compiled(case), one_process(case))
