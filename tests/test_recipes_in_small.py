"""Each recipe for a machine, with small dimensions and degrees, trains as one process does."""

import attrs
import pytest

from nanotrain_core.recipe import load_recipe
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.compare import assert_numbers, assert_same, whole
from nanotrain_core.testing.probe import train

#: Of every recipe: its structure stays. In float64, so that what differs is no rounding.
COMMON = {
    "run": "{steps=2,log_every=1}",
    "evaluation.sequences": 0,
    "precision.use": "fp64",
    "batch.length": 16,
    "model": "{width=32,vocab=64,ffn=64,layers=4}",
    "optimizer.lr_schedule.warmup_steps": 0,
    "data": "{use='synthetic',vocab=64}",
    "monitor": "[]",
}
LLAMA = {"model": "{heads=8,kv_heads=4}", "batch.sequences": 8}
DEEPSEEK = {
    "model": "{heads=4,kv_rank=8,nope_size=8,rope_size=4,value_size=8,experts=8,top_k=3,init_std=0.1}",
    "model.expert_ffn": 16,
}
MOE = {"model": "{heads=8,kv_heads=4,experts=8,top_k=3,init_std=0.1}", "model.expert_ffn": 16}
V3 = {"model": "{dense_layers=1,q_rank=8,groups=4,group_limit=2}"}
#: Ranks, and tables that are laid over the recipe one after the other.
SMALL = {
    "llama_1b": (2, LLAMA),
    "llama_8b": (4, LLAMA),
    "llama_70b": (8, LLAMA, {"topology": "{tp=2,pp=2}"}),
    "llama_70b_qlora": (2, LLAMA, {"batch.sequences": 4}),
    "long_context": (4, LLAMA, {"topology": "{tp=2}"}),
    "qwen3_30b_a3b": (4, MOE, {"topology": "{ep=2}", "batch.sequences": 16}),
    "mixtral_8x7b": (4, MOE, {"topology": "{ep=2}", "batch.sequences": 8}),
    # The second step is one of the second phase.
    "deepseek_v2_lite": (
        2,
        DEEPSEEK,
        {"topology": "{ep=2}", "batch.sequences": 4, "phase.0.until_tokens": 64},
    ),
    # The batch grows with the second step.
    "deepseek_v3_671b": (
        8,
        DEEPSEEK,
        V3,
        {"topology": "{pp=2,ep=2}", "batch.sequences": 16, "phase.0.until_tokens": 200},
        {"phase.0.batch.sequences": "{start=8,end=16,by=4}"},
    ),
    # The second step is one of the second phase, with longer sequences.
    "deepseek_v3_128k": (
        8,
        DEEPSEEK,
        V3,
        {"topology": "{tp=2,pp=2,ep=2}", "batch.sequences": 8, "phase.0.until_tokens": 100},
        {"phase.1.batch": "{sequences=4,length=32}"},
    ),
}
ONE_PROCESS = {
    "run": "{ranks=1}",
    "topology": "{tp=1,pp=1,ep=1}",
    "parallel": "[]",
    "schedule.use": "accumulate",
}
#: Wrappers that one process has, too: their parameters are trained.
ADAPTERS = {"llama_70b_qlora": "[{use='lora',rank=16,alpha=32.0}]"}


def lines(*tables):
    """Return overrides as of ``--set``."""
    return tuple(f"{key}={value}" for table in tables for key, value in table.items())


@attrs.define(frozen=True)
class Shipped:
    """A shipped recipe with overrides, as the harness takes a case."""

    name: str
    overrides: tuple[str, ...]

    def recipe(self, **changes):
        """Return the checked recipe, without weights that it starts from, as it has other shapes."""
        found = load_recipe(self.name, overrides=self.overrides)
        return attrs.evolve(found, run=attrs.evolve(found.run, weights=None))

    def registry(self):
        """Return the installed plugins."""
        return load_plugins()


FIRST = "deepseek_v2_lite"
MORE = [pytest.param(name, marks=pytest.mark.full) for name in SMALL if name != FIRST]


@pytest.mark.parametrize("name", [FIRST, *MORE])
def test_trains_as_one_process(name):
    ranks, *tables = SMALL[name]
    case = Shipped(name, lines(COMMON, *tables, {"run": f"{{ranks={ranks}}}"}))
    spread = run_ranks(train, ranks, case, {})
    one = lines(ONE_PROCESS, {"parallel": ADAPTERS.get(name, "[]")})
    (alone,) = run_ranks(train, 1, attrs.evolve(case, overrides=case.overrides + one), {})
    for part in ("gradients", "weights"):
        found = whole([getattr(trace, part) for trace in spread], atol=1e-9)
        assert_same(found, whole([getattr(alone, part)]), part, atol=1e-9)
    for trace in spread:
        got, want = ([n for r in t.reports for n in (r.loss, r.grad_norm, r.lr)] for t in (trace, alone))
        assert_numbers(got, want, "loss, norm and rate", atol=1e-9)
        assert len(trace.reports) == 2
