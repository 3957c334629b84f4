"""What monitors look at is the whole model's on every layout: gradients, weights, updates, activations."""

import math

import attrs
import pytest
import torch
from compositions import Composition, compiled
from structlog.testing import capture_logs

from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import PluginError
from nanotrain_core.layout.roles import main_layers
from nanotrain_core.metrics.declared import STATISTICS, Metric
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import Reports, make_engine, train, weights

TOLERANCE = 1e-9
WHAT = ("gradients", "weights", "exp_avg", "updates")
ACTIVATIONS = ("rms", "mean", "std", "max_abs")
ADAMW = {"optimizer": {"use": "adamw", "lr": 0.01, "clip_norm": 0.5}}
DDP = Case("parallel", use="ddp", topology={"dp": 2})


class Looks(Monitor):
    """Publishes every statistic of everything."""

    declared = (
        *(
            Metric(name=f"{what}/{statistic}/{{name}}", unit="1", group=what, summary="for a test")
            for what in (*WHAT, "activations")
            for statistic in STATISTICS
        ),
        Metric(
            name="experts/{router}/{number}", unit="tokens", group="moe", summary="for a test", reduce="last"
        ),
    )

    def __init__(self, modules=()):
        self.modules, self.told = modules, {}

    def on_start(self, run):
        self.run = run
        self.seen = run.observe_outputs(self.look, self.modules)

    def look(self, name, output):
        if isinstance(output, torch.Tensor) and output.is_floating_point():  # of a router not
            self.run.metrics.statistics(f"activations/{{statistic}}/{name}", output, ACTIVATIONS)

    def placed(self, what, tensors):
        self.run.metrics.placed(f"{what}/{{statistic}}/{{parameter}}", tensors, STATISTICS)

    def on_before_update(self, update):
        if update.logged:
            self.placed("gradients", update.placed_gradients())
            self.placed("weights", self.run.weights())
            update.keep_weights()

    def on_after_update(self, update):
        if update.logged:
            self.placed("updates", update.changes())
            self.placed("exp_avg", self.run.optimizer_state("exp_avg"))
            for name, load in update.loads.items():
                for number, tokens in enumerate(load.unbind()):
                    self.run.metrics.scalar(f"experts/{name}/{number}", tokens)

    def on_metrics(self, report):
        if report.published:
            self.told[report.step] = {name: report.values[name] for name in report.published}


def look(case, changes, modules=()):
    """Return what is told by step, the names of observed modules, losses and weights."""
    monitor, seen = Looks(modules), Reports()
    engine = make_engine(case, changes, callbacks=[monitor, seen])
    engine.fit()
    return monitor.told, monitor.seen, [report.loss for report in seen.reports], weights(engine.run)


FOUR = Composition(
    model="deepseek_v3",
    tp=2,
    pp=2,
    dp=2,
    ep=2,
    etp=1,
    schedule="1f1b",
    sp=True,
    tied=True,
    microbatch=3,
    experts_first=False,
    zero=1,
    recompute=True,
)
MODULES = ("layers.?", "layers.1.*", "embed", "*.norm*")
#: Of two steps the second is logged, with what was published in both.
TWO_STEPS = {"run": {"steps": 2, "log_every": 2}}


def assert_looks_the_same(composition, modules, steps):
    case = composition.case()
    optimizer = composition.optimizers()["adamw"]
    ranks = run_ranks(look, composition.ranks, case, {"optimizer": optimizer, **steps}, modules)
    ((alone, names, losses, _),) = run_ranks(look, 1, case.alone(), {**ADAMW, **steps}, modules)
    assert len(names) > composition.layers
    for rank, (told, seen, ours, _) in enumerate(ranks):
        assert seen == names
        assert ours == pytest.approx(losses, rel=TOLERANCE, abs=TOLERANCE)
        assert told.keys() == alone.keys()
        for step, values in told.items():
            assert values.keys() == alone[step].keys()
            wrong = {
                name: (value, alone[step][name])
                for name, value in values.items()
                # A head returns the sum of a microbatch's losses, and ranks divide a batch differently.
                if not (name.startswith("activations/") and name.endswith("/head"))
                and not math.isclose(value, alone[step][name], rel_tol=TOLERANCE, abs_tol=TOLERANCE)
            }
            assert not wrong, f"rank {rank}, step {step}: {wrong}"
    return alone


@pytest.mark.full  # of the first tier: that of health
def test_on_eight_ranks_every_statistic_is_that_of_one_process():
    """Over pp, tp with sequence parallelism, dp, ep and ZeRO, with recomputed layers and a tied head."""
    alone = assert_looks_the_same(FOUR, MODULES, TWO_STEPS)
    for what in (*WHAT, "activations"):
        assert any(name.startswith(f"{what}/") and value for name, value in alone[2].items()), what
    assert sum(value for name, value in alone[2].items() if name.startswith("experts/")) > 0


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.full), False])
def test_of_two_modules_of_a_name_on_a_rank_each_is_observed(tied):
    """The first and the last stage of a V are on one rank, and each has the embedding, tied or for MTP."""
    model = {"model": "transformer" if tied else "deepseek_v3", "tied": tied, "sp": False, "zero": 0}
    shape = {"tp": 1, "dp": 1, "ep": 1, "schedule": "dualpipe_v", "recompute": False}
    assert_looks_the_same(attrs.evolve(FOUR, **model, **shape), ["embed", "layers.*"], {"run": {"steps": 1}})


def test_statistics_are_those_of_plain_tensors():
    """Written apart: of one process, from the tensors themselves."""
    engine = make_engine(DDP.alone(), ADAMW | {"run": {"steps": 1}}, callbacks=[Looks(["embed"])])
    before = {placed.placement.name: placed.parameter.detach().clone() for placed in engine.run.placed}
    outputs = []
    engine.run.stages[0].embed.register_forward_hook(lambda m, a, out: outputs.append(out.detach().clone()))
    engine.fit()
    told = engine.run.monitors[-1].told[1]
    embedded = torch.cat([out.flatten(0, 1) for out in outputs[: len(outputs)] if out.shape])
    for placed in engine.run.placed:
        name, old = placed.placement.name, before[placed.placement.name]
        change = placed.parameter.detach() - old
        for what, x in (("weights", old), ("updates", change)):
            assert told[f"{what}/norm/{name}"] == pytest.approx(x.norm().item(), rel=1e-12)
            assert told[f"{what}/mean/{name}"] == pytest.approx(x.mean().item(), rel=1e-9, abs=1e-15)
            assert told[f"{what}/std/{name}"] == pytest.approx(x.std(correction=0).item(), rel=1e-6, abs=1e-7)
            assert told[f"{what}/max_abs/{name}"] == x.abs().max().item()
    assert told["activations/max_abs/embed"] <= embedded.abs().max().item()


class Selects(Monitor):
    """Reads in the second of three steps, and fails in the third."""

    every_step = True

    def on_start(self, run):
        self.step, self.asked, self.read = 0, [], []
        run.observe_outputs(lambda name, output: self.read.append(self.step + 1), when=self.reads)

    def reads(self):
        self.asked.append(self.step + 1)
        if self.step == 2:
            raise ZeroDivisionError("planted")
        return self.step == 1

    def on_step(self, report):
        self.step = report.step


def test_a_tap_is_read_in_steps_that_its_monitor_selects_and_a_failure_ends_an_event_alone():
    monitor = Selects()
    case = Case("parallel", use="ddp", overrides={"batch": {"sequences": 4, "microbatch": 2}})
    engine = make_engine(case, {"run": {"steps": 3, "log_every": 1, "strict_monitors": False}})
    engine.events.monitors = [monitor]
    with capture_logs() as logs:
        engine.fit()
    layers, microbatches = 2, 2
    assert (monitor.asked, monitor.read) == ([1, 2, 3], [2] * layers * microbatches)
    assert [each["monitor"] for each in logs if each["log_level"] == "error"] == ["Selects.on_before_update"]


def test_the_sentinels_are_the_first_the_middle_and_the_last_layer():
    case = Case("parallel", use="ddp", overrides={"model": {"layers": 5}})
    assert look(case, {"run": {"steps": 1}})[1] == ["layers.0", "layers.2", "layers.4"]


def test_a_block_of_multi_token_prediction_is_not_the_last_layer():
    assert main_layers(["mtp.0.block", "layers.10", "layers.2", "layers.0"]) == [
        "layers.0",
        "layers.2",
        "layers.10",
    ]
    assert main_layers([]) == []
    case = FOUR.case().alone()
    layers = case.recipe().model.config.layers
    assert case.recipe().model.config.mtp
    assert look(case, {"run": {"steps": 1}})[1] == [
        f"layers.{n}" for n in sorted({0, layers // 2, layers - 1})
    ]


@pytest.mark.full  # tests/test_all_monitors.py has all monitors on two ranks in the first tier
@pytest.mark.parametrize(
    "composition",
    [pytest.param(FOUR, id="4d"), pytest.param(compiled, id="compiled")],
)
def test_looking_changes_no_bit(composition):
    """Losses and weights of runs with observers and without, of which every second step is logged."""
    case = composition.case() if composition is FOUR else compiled(DDP)
    changes = {"run": {**case.overrides.get("run", {}), "steps": 3, "log_every": 2}}
    world = case.world_size
    watched = run_ranks(look, world, case, changes)
    alone = run_ranks(train, world, case, changes)
    for (told, _, losses, after), trace in zip(watched, alone, strict=True):
        assert set(told) == {2, 3}
        assert losses == [report.loss for report in trace.reports]
        for mine, other in zip(after, trace.weights, strict=True):
            assert torch.equal(mine.tensor, other.tensor), mine.name


def graphs(case, modules, observed):
    from torch._dynamo.utils import counters

    counters.clear()
    engine = make_engine(case, {"run": {**case.overrides["run"], "steps": 3, "log_every": 2}})
    engine.events.monitors = [Looks(modules)] if observed else []
    engine.fit()
    return counters["stats"]["unique_graphs"]


@pytest.mark.full
def test_a_tap_on_a_compiled_layer_makes_no_graph_more():
    case = compiled(DDP).alone()
    ((more,), (none,)) = (run_ranks(graphs, 1, case, (), observed) for observed in (True, False))
    assert more == none > 0


def test_a_tap_inside_of_a_compiled_layer_is_refused():
    with pytest.raises(PluginError, match=r"layers\.0\.attn is inside of layers\.0, which is compiled"):
        graphs(compiled(DDP).alone(), ["layers.0.attn"], True)


class LooksAtAttention(Monitor):
    """Publishes the largest logit of the last query, over all heads and layers."""

    declared = (Metric(name="logit/{layer}", unit="1", group="attention", summary="", reduce="max"),)

    def on_start(self, run):
        self.run, self.told = run, []
        run.observe_calls("attention", self.look)

    def look(self, name, q, k, v, scale=None):
        assert (q.requires_grad, scale) == (False, None)
        scores = torch.einsum("bhk,bshk->bhs", q[:, -1], k) * q.shape[-1] ** -0.5
        self.run.metrics.scalar(f"logit/{name}", scores.amax())

    def on_metrics(self, report):
        self.told.append({name: report.values[name] for name in report.published})


def attention_of(case, changes, looked=True):
    from torch._dynamo.utils import counters

    counters.clear()
    seen, looks = Reports(), LooksAtAttention()
    engine = make_engine(case, changes, callbacks=[seen, *([looks] if looked else [])])
    engine.fit()
    losses = [report.loss for report in seen.reports]
    return looks.told if looked else [], losses, weights(engine.run), counters["stats"]["unique_graphs"]


@pytest.mark.full
def test_calls_of_attention_are_told_of_inside_of_a_graph_too():
    """As many graphs as without, the same numbers, and what layers that run eager are called with."""
    changes = {"run": {"steps": 3, "log_every": 2}, "parallel": [{"use": "recompute"}]}
    case = compiled(DDP).alone()
    changes["run"] |= case.overrides["run"] | {"steps": 3, "log_every": 2}
    told, losses, after, graphs = attention_of(case, changes)
    eager = attention_of(DDP.alone(), changes | {"run": {"steps": 3, "log_every": 2}})[0]
    plain = attention_of(case, changes, looked=False)
    assert [set(each) for each in told] == [{"logit/layers.0", "logit/layers.1"}] * 2
    assert [pytest.approx(each, rel=1e-9) for each in eager] == told
    assert (losses, graphs) == (plain[1], plain[3])
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(after, plain[2], strict=True))


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda run: run.mesh.gather(1), "may call no collective while it looks at a module"),
        (lambda run: 1 / 0, "division by zero"),
    ],
)
def test_a_look_that_fails_is_a_failure_of_the_monitor(act, text):
    class Breaks(Looks):
        def look(self, name, output):
            act(self.run)

    engine = make_engine(DDP.alone(), {"run": {"steps": 2, "strict_monitors": False}})
    engine.events.monitors = [Breaks()]
    if "collective" in text:
        with pytest.raises(PluginError, match=text):
            engine.fit()
        return
    with capture_logs() as logs:
        engine.fit()
    failures = [entry["monitor"] for entry in logs if entry["log_level"] == "error"]
    assert failures == ["Breaks.on_before_update"]  # once, though both steps failed


def test_a_module_that_is_nowhere_is_told_with_the_nearest():
    with pytest.raises(PluginError, match=r"'layer\.0' on any rank \(did you mean 'layers\.0'\?\)"):
        look(DDP.alone(), {}, ["layer.0"])


def test_a_script_s_callback_looks_and_publishes_too():
    from nanotrain_core.engine import RuntimeEngine
    from nanotrain_core.script import ScriptConfig

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 8))
    optimizer, monitor = torch.optim.AdamW(model.parameters()), Looks(["1"])
    batches = [(torch.randint(8, (2, 5)), torch.randint(8, (2, 5))) for _ in range(4)]
    RuntimeEngine(model, optimizer, ScriptConfig(), callbacks=[monitor]).fit(batches, steps=2)
    assert monitor.seen == ["1"]
    told = monitor.told[2]
    assert {"gradients/norm/1.weight", "updates/norm/2.bias", "activations/rms/1"} <= told.keys()
