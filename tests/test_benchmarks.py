"""The benchmark compares two programs that do the same computation, and reports what it measured."""

import time
from types import SimpleNamespace
from unittest import mock

import attrs
import pytest
import torch
from nanotrain_pp_1f1b import PipelineConfig
from nanotrain_pp_1f1b.components import OneForwardOneBackward

from benchmarks.__main__ import main
from benchmarks.bubble import Each, Step, Stopwatch, idle, medians, merged
from benchmarks.cases import CASES, DROPINS, Case
from benchmarks.masters import BASELINE, RECIPE, Setup, Shadow, Trained, table
from benchmarks.monitors import Meter, Turn, compare
from benchmarks.narrow import CASES as NARROW
from benchmarks.narrow import Slowdown
from benchmarks.optimizer import HostTime, milliseconds, ours, torchs
from benchmarks.ours import batches
from benchmarks.peers import Llama, Loop
from benchmarks.race import Result
from benchmarks.report import BEGIN, END, write_markdown
from nanotrain_core.contracts import Monitor
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.pipeline.actions import Action
from nanotrain_core.pipeline.simulator import simulate
from nanotrain_core.recipe import load_recipe

CASE = Case(name="small", peer="PyTorch loop")


def small_recipe():
    recipe = CASE.recipe()

    def change(section, **values):
        return attrs.evolve(section, config=attrs.evolve(section.config, **values))

    return attrs.evolve(
        recipe,
        run=attrs.evolve(recipe.run, log_every=1),
        batch=attrs.evolve(recipe.batch, length=16),
        model=change(recipe.model, layers=2, width=32, heads=4, ffn=48, vocab=64),
        data=change(recipe.data, vocab=64, sequences=64),
    )


class Losses(Monitor):
    def __init__(self):
        self.values = []

    def on_step(self, report):
        self.values.append(report.loss)


def test_engine_and_peer_follow_the_same_losses_from_the_same_weights():
    recipe, seen = small_recipe(), Losses()
    engine = RuntimeEngine.from_recipe(recipe)
    engine.events.monitors = (seen,)
    model = Llama(recipe.model.config, recipe.batch.length)
    model.load_state_dict(engine.run.stages[0].state_dict())
    loop, stream = Loop(recipe, model), batches(recipe, rank=0)

    engine.fit(steps=3)
    theirs = [loop.step(next(stream)).item() for _ in range(3)]

    assert len(set(theirs)) == 3
    assert seen.values[0] == pytest.approx(theirs[0], abs=1e-5)
    assert seen.values == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("case", [*CASES, *DROPINS], ids=lambda case: case.name)
def test_every_data_parallel_rank_of_every_case_steps_on_eight_sequences(case):
    recipe = case.recipe()
    assert recipe.run.ranks == case.ranks
    assert recipe.batch.sequences * case.tp * case.pp == 8 * case.ranks


@pytest.mark.parametrize(("ratios", "passed"), [((0.9, 1.0, 1.4), True), ((0.9, 0.99, 1.4), False)])
def test_the_median_ratio_decides(ratios, passed):
    assert Result(CASE, 1.0, 1.0, ratios).passed is passed


def test_figures_go_between_the_markers_and_nowhere_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_markdown(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"


def test_a_page_without_markers_is_left_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no markers\n")
    with pytest.raises(ValueError, match=r"page\.md needs the lines"):
        write_markdown(page, "new")
    assert page.read_text() == "no markers\n"


def test_an_unknown_benchmark_is_refused_with_the_names_there_are(capsys):
    with pytest.raises(SystemExit):
        main(["fp32"])
    assert "no benchmark named fp32; there are fp32-1-thread" in capsys.readouterr().err


def step(stage, forward, backward, seconds):
    """Return one rank's step of two microbatches on its only stage."""
    kinds = {"F": forward, "B": backward}
    return Step({Action(kind, stage, m): kinds[kind][m] for kind in "FB" for m in (0, 1)}, seconds)


STEP = step(0, (1.0, 1.0), (2.0, 2.0), 12.0), step(1, (1.0, 3.0), (2.0, 2.0), 10.0)


def test_a_pipeline_is_idle_where_no_action_runs():
    assert idle(STEP) == pytest.approx(1 - (6 + 8) / 24)


def test_a_step_is_simulated_with_the_times_its_own_actions_took():
    lists = OneForwardOneBackward(PipelineConfig()).actions(2, 2)
    timeline = simulate(lists, Each(times=merged(STEP)))
    assert timeline.makespan == 1 + 1 + 2 + 3 + 2 + 2  # F0, then rank 1 without a pause, and rank 0's last B
    assert timeline.bubble() == pytest.approx(1 - 14 / 22)


def test_median_times_are_of_each_stage():
    found = medians([[STEP[0]], [STEP[1]]])
    assert (found.forward, found.backward, found.weight) == ([1.0, 2.0], [2.0, 2.0], [0.0, 0.0])


def test_waiting_is_no_part_of_an_action_and_all_else_is(monkeypatch):
    clock = [0.0]

    def spend(seconds, *, waiting=False):
        clock[0] += seconds
        executor.p2p.waited += seconds * waiting

    class Executor:
        p2p = SimpleNamespace(waited=5.0)

        def _execute(self, action):
            spend(2.0, waiting=True)
            spend(3.0)

        def run(self):
            spend(0.5)
            for m in (0, 1):
                self._execute(Action("F", 0, m))
                spend(0.25)
            spend(4.0, waiting=True)

    monkeypatch.setattr("benchmarks.bubble.time.perf_counter", lambda: clock[0])
    executor = Executor()
    watch = Stopwatch(executor)
    executor.run()
    (found,) = watch.steps
    assert list(found.actions.values()) == [3.5, 3.5]
    assert found.seconds == 15.0


# --- masters and moments ------------------------------------------------------------------------------


def shadowed(dtype):
    overrides = ["run.steps=5", "model.layers=1", "model.width=32", "model.ffn=32", "batch.length=16"]
    overrides += ["evaluation.sequences=0", f"optimizer.moment_dtype={dtype}"]
    engine = RuntimeEngine.from_recipe(load_recipe(RECIPE, overrides=overrides))
    shadow = Shadow(engine.run.optimizer)
    engine.fit()
    return shadow.errors()


def test_moments_beside_are_those_that_torch_would_have():
    assert max(shadowed("float32")) < 1e-6
    narrow, eight = shadowed("bfloat16"), shadowed("int8")
    assert all(1e-4 < few < many < 0.1 for few, many in zip(narrow, eight, strict=True))


def test_a_gap_is_to_the_same_seed_with_float32_masters_and_moments():
    eight = Setup("bf16 residual", "int8")
    runs = [Trained(BASELINE.name, seed, 2.0 * seed, (2.0, 4.0, 8.0), None) for seed in (1, 2)]
    runs += [
        Trained(eight.name, seed, 2.0 * seed + 0.1 * seed, (2.0, 1.0, 2.125), (0.01, 0.02, 0.03))
        for seed in (1, 2)
    ]
    last = table(runs).splitlines()[-1]
    wanted = "2.00 | 1.00 | 2.12 | 5.12 | 1.00%, 2.00%, 3.00% | 3.1500 | +0.1500 ± 0.0500 (+5.00%) |"
    assert last == f"| bf16 residual, int8 moments | {wanted}"


@pytest.mark.parametrize(("ratios", "passed"), [((2.0, 3.0, 9.0), True), ((2.0, 3.01, 3.02), False)])
def test_emulated_steps_may_take_three_times_as_long_in_the_median(ratios, passed):
    assert Slowdown("small", 3.0, 1.0, ratios).passed is passed


@pytest.mark.parametrize("case", NARROW, ids=lambda case: case.name)
def test_both_precisions_train_one_recipe(case):
    narrow, wide = (attrs.evolve(case, precision=use).recipe() for use in ("fp8_deepseek_v3", "bf16"))
    assert (narrow.precision.use, wide.precision.use) == ("fp8_deepseek_v3", "bf16")
    assert attrs.evolve(narrow, precision=wide.precision, versions=wide.versions) == wide
    assert wide.run.ranks == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_optimizers_take_the_same_steps(precision):
    """Of gradients that are clipped."""
    (mine, step), (other, torchs_step) = ours(precision), torchs()
    milliseconds(mine, step, 3)
    milliseconds(other, torchs_step, 3)
    assert len(mine) == len(other) == 200
    for found, expected in zip(mine, other, strict=True):
        assert not torch.equal(expected, torch.ones_like(expected))
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("ratios", "passed"), [((0.8, 0.9, 2.0), True), ((0.8, 0.89, 2.0), False)])
def test_an_optimizer_must_cost_what_torchs_does_in_the_median(ratios, passed):
    found = HostTime("fp32", 1.0, 1.0, ratios)
    assert found.passed is passed
    assert len(found.row()) == len(found.HEADER)


def test_what_threads_do_for_a_monitor_counts_as_the_monitors_time():
    """A reduction through sockets keeps gloo's threads busy while the rank's own waits."""
    meter = Meter()
    with mock.patch.object(time, "process_time", side_effect=[1.0, 3.0]):
        meter.timed(lambda: None)()
    assert meter.seconds == 2.0


def test_what_monitors_take_is_compared_pair_by_pair_over_all_ranks():
    """Of two ranks and three pairs: 206 ms of processor time against 200, of which 1.5 go into monitors, 0.5
    without any."""
    pair = (Turn(cpu=103.0, wall=60.0, own=1.5), Turn(cpu=100.0, wall=50.0, own=0.5))
    found = compare("health", [[pair] * 3, [pair] * 3])
    assert (found.ranks, found.watched, found.alone) == (2, 206.0, 200.0)
    assert found.own == pytest.approx(1.5 / 103 - 0.5 / 100)
    assert found.cpu == (1.03,) * 3
    assert found.wall == (1.2,) * 3
    assert not found.passed  # by its own time, but every pair says more
    cheap = (Turn(cpu=100.5, wall=60.0, own=1.0), pair[1])
    assert compare("health", [[cheap] * 3]).passed


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["helth"], "no row named helth; there are health, performance, standard"),
        (["standard", "--steps", "10"], "expected 2 rounds or more, of 40 steps or a multiple"),
        (["standard", "--rounds", "1"], "expected 2 rounds or more, of 40 steps or a multiple"),
    ],
)
def test_what_monitors_cost_is_measured_over_whole_intervals_of_named_rows(words, why, capsys):
    """A turn without the step that reads tensors would call them cheap."""
    with pytest.raises(SystemExit):
        main(["monitors", *words])
    assert why in capsys.readouterr().err
