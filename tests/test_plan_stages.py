"""Pipelines in plans: stages that a run cuts once for all its phases, and what they send one another."""

import json
import re

import pytest
from nanotrain_plan.blocks.composer import Composer
from nanotrain_plan.hardware import find_hardware
from nanotrain_plan.plan import make_plan, to_json
from nanotrain_plan.stages import pipeline_of_most_tokens

from nanotrain_core.api import Layout, View, resolve_recipe
from nanotrain_core.cli import main

#: A head costs 2.7 layers where sequences are short, less than half of one where attention is long.
RECIPE = """
[run]
steps = 20
ranks = 2
[batch]
sequences = 4
microbatch = 1
length = 16
[model]
use = "transformer"
layers = 6
width = 64
heads = 4
vocab = 2048
[topology]
use = "grid"
pp = 2
[schedule]
use = "1f1b"
{layers}
[data]
use = "synthetic"
vocab = 256
"""


PHASES = """
[[phase]]
name = "short"
until_tokens = 640
[[phase]]
name = "long"
batch.length = 4096
"""


def test_all_phases_have_the_stages_that_the_run_cuts_for_its_longest_sequences(tmp_path, capsys):
    steps, stages = [], []
    for number, layers in enumerate(("", "layers = [3, 3]", "layers = [4, 2]")):
        path = tmp_path / f"{number}.toml"
        path.write_text(RECIPE.replace("{layers}", layers) + PHASES)
        found = resolve_recipe(str(path))
        plan = make_plan(found.recipe, found.registry, found.layout, find_hardware("h100"))
        steps.append([phase.step for phase in plan.phases])
        assert main(["schedule", str(path)]) == 0
        stages.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("stage")])
    for cut, as_for_long, as_for_short in (steps, stages):
        assert cut == as_for_long != as_for_short


def test_a_last_microbatch_of_fewer_sequences_travels_between_stages_in_its_own_shape(tmp_path, capsys):
    path = tmp_path / "uneven.toml"
    path.write_text(RECIPE.replace("{layers}", ""))
    batch = ("--set", "batch.sequences=3", "--set", "batch.microbatch=2", "--set", "batch.length=32")
    assert main(["plan", str(path), "--hardware", "cpu", "--json", *batch]) == 0
    plan = json.loads(capsys.readouterr().out)
    sent = [each for each in plan["collectives"]["of_a_step"] if each["op"] in ("send", "recv")]
    assert [each["count"] for each in sent] == [2, 2]  # of two and of one sequence, each way
    assert [each["bytes"] for each in sent] == [4 * 3 * 32 * 64] * 2


def test_a_stage_waits_for_a_message_on_its_way(tmp_path):
    """Of one microbatch nothing overlaps: F on both stages, then B on both, with a message in each direction.

    A message of 16 x 64 float32 is 4096 bytes at 80% of 2.5 GB/s, after 100 us and a quarter of it more.
    """
    path = tmp_path / "one.toml"
    path.write_text(RECIPE.replace("{layers}", "").replace("sequences = 4", "sequences = 1"))
    found = resolve_recipe(str(path))
    time = make_plan(found.recipe, found.registry, found.layout, find_hardware("cpu")).time
    assert time.durations.p2p == pytest.approx(125e-6 + 4096 / 2e9)
    busy = sum(time.timeline.busy(rank) for rank in (0, 1))
    assert time.pipeline == pytest.approx(busy + 2 * time.durations.p2p)


FOUR_RANKS = ("--set", "topology.pp=4", "--set", "schedule.layers=[2, 1, 1, 2]", "--ranks", "4")


def test_a_plan_is_the_same_whether_its_dry_steps_are_taken_in_forks_or_one_after_another(tmp_path):
    path = tmp_path / "four.toml"
    path.write_text(RECIPE.replace("{layers}", ""))
    found = resolve_recipe(str(path), overrides=FOUR_RANKS[1::2][:2], ranks=4)
    one, forked = (
        make_plan(found.recipe, found.registry, found.layout, find_hardware("h100"), processes=processes)
        for processes in (1, 2)
    )
    assert sorted(one.stages.steps) == [0, 1, 3]  # the first, one in the middle, and the last
    tables = [to_json(plan) for plan in (one, forked)]
    for table in tables:
        del table["checkpoints"]["free"]  # other programs write meanwhile
    assert tables[0] == tables[1]


MORE_IN_FLIGHT = """
[[phase]]
name = "few"
until_tokens = 6400
[[phase]]
name = "many"
batch.sequences = 16
batch.microbatch = 1
"""


@pytest.mark.full
def test_memory_is_that_of_the_phase_with_the_highest_peak(tmp_path):
    """Microbatches of the second phase are half as large, and four times as many are in flight."""
    path, alone = tmp_path / "phases.toml", tmp_path / "many.toml"
    recipe = RECIPE.replace("{layers}", "").replace("length = 16", "length = 512")
    few = recipe.replace("sequences = 4", "sequences = 2").replace("microbatch = 1", "microbatch = 2")
    path.write_text(few + MORE_IN_FLIGHT)
    alone.write_text(recipe.replace("sequences = 4", "sequences = 16"))
    h100, plans, estimates = find_hardware("h100"), [], []
    for each in (path, alone):
        found = resolve_recipe(str(each), overrides=FOUR_RANKS[1:2], ranks=4)
        plans.append(make_plan(found.recipe, found.registry, found.layout, h100))
        estimates.append(Composer(found.registry, h100).estimate(found.recipe, found.layout))
    assert [plan.memory_phase for plan in plans] == ["many", ""]
    peaks = [[(rank.peak, rank.in_flight) for rank in plan.memory] for plan in plans]
    assert peaks[0] == peaks[1]
    assert plans[0].worst.in_flight == 4
    assert to_json(plans[0])["memory"]["phase"] == "many"
    assert estimates[0].peak == estimates[1].peak == pytest.approx(plans[0].worst.peak, rel=0.05)
    assert max(rank.peak for rank in estimates[0].memory) < estimates[0].peak


def test_offloaded_activations_are_those_of_the_phase_that_has_most_of_them(tmp_path):
    path, alone = tmp_path / "phases.toml", tmp_path / "many.toml"
    recipe = RECIPE.replace("{layers}", "").replace("length = 16", "length = 512")
    recipe += '[[parallel]]\nuse = "activation_offload"\nmin_mb = 0.0\nkeep = 0\n'
    few = recipe.replace("sequences = 4", "sequences = 2").replace("microbatch = 1", "microbatch = 2")
    path.write_text(few + MORE_IN_FLIGHT)
    alone.write_text(recipe.replace("sequences = 4", "sequences = 16"))
    hosts = []
    for each in (path, alone):
        found = resolve_recipe(str(each), overrides=FOUR_RANKS[1:2], ranks=4)
        hosts.append(make_plan(found.recipe, found.registry, found.layout, find_hardware("h100")).host)
    assert hosts[0].activations == hosts[1].activations > 0


def test_every_pipeline_rank_has_its_collectives(tmp_path, capsys):
    """Each of 4 microbatches goes to the next stage and its gradient to the one before, 16 x 64 float32."""
    path, page = tmp_path / "four.toml", tmp_path / "plan.html"
    path.write_text(RECIPE.replace("{layers}", ""))
    words = [str(path), "--hardware", "cpu", *FOUR_RANKS]
    assert main(["plan", *words, "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)["collectives"]
    messages = []
    for each in found["ranks"]:
        counts = {row["op"]: row["count"] for row in each["of_a_step"] if row["axis"] == "pp"}
        messages.append((each["pp_rank"], counts["send"], counts["recv"]))
        sizes = {row["bytes"] / row["count"] for row in each["of_a_step"] if row["op"] in ("send", "recv")}
        assert sizes == {4 * 16 * 64}
        assert all(row["seconds"] >= row["exposed"] >= 0 for row in each["of_a_step"])
    assert messages == [(0, 4, 4), (1, 8, 8), (2, 8, 8), (3, 4, 4)]
    loudest = {each["pp_rank"]: each["of_a_step"] for each in found["ranks"]}[found["pp_rank"]]
    assert found["of_a_step"] == loudest
    text = page.read_text()
    kinds = re.findall("<h3>(Pipeline ranks? [^<]*)</h3><div class=wide><table>", text)
    assert kinds == ["Pipeline rank 0", "Pipeline ranks 1, 2", "Pipeline rank 3"]


def test_every_stage_has_its_activations_and_stages_that_are_alike_are_told_once(tmp_path, capsys):
    path, page = tmp_path / "four.toml", tmp_path / "plan.html"
    path.write_text(RECIPE.replace("{layers}", ""))
    assert main(["plan", str(path), "--hardware", "cpu", *FOUR_RANKS, "--json", "--html", str(page)]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    found = memory["activations_by_stage"]
    assert [(each["stages"], each["measured"]) for each in found] == [([0], 0), ([1, 2], 1), ([3], 3)]
    first, middle, last = (each["layers"] for each in found)
    layers = [n for each in found for name, n in each["layers"].items() if name.startswith("layers.")]
    assert len(layers) == 5
    assert len({*layers}) == 1
    assert {"embed", "layers.0", "layers.1"} <= {*first}
    assert {*middle} == {"layers.2", "outside"}  # what the stage before has sent
    assert {"layers.4", "layers.5", "head"} <= {*last}
    for each in found:
        assert each["bytes"] == sum(row["bytes"] * row["count"] for row in each["tensors"])
        assert each["bytes"] == sum(each["layers"].values())
    own = next(each for each in found if memory["pp_rank"] in each["stages"])
    assert memory["activations"] == [{"stage": memory["pp_rank"], **row} for row in own["tensors"]]
    headings = re.findall("<h3>(Stage [^<]*)</h3>", page.read_text())
    assert headings == ["Stage 0", "Stage 1 (alike: 2)", "Stage 3"]
    assert page.read_text().count("<details><summary>tensors</summary>") == 3


def test_of_a_rank_with_two_stages_a_terminal_has_the_one_that_keeps_most(tmp_path, capsys):
    path = tmp_path / "v.toml"
    path.write_text(RECIPE.replace("{layers}", "").replace("1f1b", "dualpipe_v"))
    assert main(["plan", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["memory"]["activations_by_stage"]
    assert [each["measured"] for each in found] == [0, 1, 2, 3]  # rank 0 has the first and the last
    assert main(["plan", str(path)]) == 0
    (told,) = re.findall(r"Activations of stage (\d)", capsys.readouterr().out)
    assert told == "3"  # with the head's logits


@pytest.mark.parametrize(("length", "ranks"), [(6, [0, 4]), (7, [1, 5])])
def test_of_a_sequence_that_ranks_share_a_plan_has_the_largest_part(length, ranks):
    layout = Layout({"dense": View(("pp", "dp", "cp"), (2, 2, 2))}, sequence_dims=("cp",))
    assert pipeline_of_most_tokens(layout, 2, length) == ranks  # of seven tokens, the second rank has four


@pytest.mark.parametrize(("sequences", "ranks"), [(6, [0, 4]), (7, [2, 6])])
def test_of_sequences_that_ranks_share_a_plan_has_the_largest_share(sequences, ranks):
    layout = Layout({"dense": View(("pp", "dp", "cp"), (2, 2, 2))}, sequence_dims=("cp",))
    assert pipeline_of_most_tokens(layout, 2, 6, sequences) == ranks  # the second of two has four of seven


SYNCED = """
[run]
steps = 20
ranks = 32
[batch]
sequences = 24
microbatch = 1
length = 1024
[model]
use = "transformer"
layers = 8
width = 1024
heads = 16
vocab = 1024
[topology]
use = "grid"
pp = 4
[schedule]
use = "dualpipe_v"
{more}
[precision]
use = "bf16"
[data]
use = "synthetic"
vocab = 256
"""

DDP = """
[[parallel]]
use = "ddp"
"""

FEW_AND_MANY = """
[[phase]]
name = "few"
until_tokens = 49_152
batch.sequences = 24
[[phase]]
name = "many"
batch.sequences = 192
"""


@pytest.fixture
def synced(tmp_path):
    def plan_of(more, **changes):
        path = tmp_path / "synced.toml"
        path.write_text(SYNCED.replace("{more}", more))
        sets = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
        found = resolve_recipe(str(path), overrides=sets)
        return make_plan(found.recipe, found.registry, found.layout, find_hardware("h100"))

    return plan_of


@pytest.mark.full
def test_few_microbatches_beside_many_have_the_gradient_sync_of_their_last_one(synced):
    """With 3 microbatches on 4 ranks DualPipe-V has other W passes than with 24, which are measured."""
    phases, alone = synced(DDP + FEW_AND_MANY), synced(DDP)
    assert phases.phases[0].step[0] == pytest.approx(alone.time.seconds, rel=0.01)


def test_no_stage_waits_for_the_gradient_sync_of_another(synced):
    """What an only microbatch syncs delays a step once, however many stages it passes through."""
    overlapped = synced(DDP, schedule__use="1f1b", batch__sequences=8).time
    without = synced("", schedule__use="1f1b", batch__sequences=1, run__ranks=4).time
    assert overlapped.after > 0.1 * without.pipeline
    assert overlapped.pipeline < without.pipeline + overlapped.after


def test_gradient_sync_after_all_passes_is_not_hidden(synced):
    """``adamw`` alone sums gradients after backward; ``ddp`` during it."""
    plans = {
        name: synced(more, schedule__use="1f1b", batch__sequences=64)
        for name, more in (("", ""), ("ddp", DDP))
    }
    sums = {
        name: max(sum(each.seconds for each in own if each.axis == "dp") for own in plan.traffic.values())
        for name, plan in plans.items()
    }
    assert sums[""] == pytest.approx(sums["ddp"], rel=0.1)
    assert plans["ddp"].time.after < sums["ddp"] + plans[""].time.after - sums[""]
    assert plans[""].time.after > sums[""]
    told = max(sum(each.exposed for each in own if each.axis == "dp") for own in plans[""].traffic.values())
    assert told == pytest.approx(sums[""])


@pytest.mark.full_cases('[[parallel]]\\nuse = "zero12"')
@pytest.mark.parametrize("use", ['[optimizer]\nuse = "zero12"', '[[parallel]]\nuse = "zero12"'])
def test_gradient_sync_that_does_not_overlap_is_waited_for(synced, use):
    """The sums of ``zero12`` follow the last backward pass, and its all-gathers the update."""
    few = {"schedule__use": "1f1b", "batch__sequences": 64}
    plan, overlapped = (synced(f"{use}\noverlap = {value}", **few) for value in ("false", "true"))
    sync = [each for own in plan.traffic.values() for each in own if each.axis == "dp"]
    assert {each.op for each in sync} == {"reduce_scatter", "all_gather"}
    assert [each.exposed for each in sync] == pytest.approx([each.seconds for each in sync])
    hidden = 0.9 * max(sum(e.seconds for e in own if e.axis == "dp") for own in plan.traffic.values())
    assert plan.time.seconds == pytest.approx(overlapped.time.seconds + hidden, rel=0.02)
