from unittest import mock

import attrs
import pytest
from recipe_files import SMALL, write

from nanotrain_core.errors import PluginError, RecipeError
from nanotrain_core.layout.layout import Layout
from nanotrain_core.pipeline.actions import Action, Part
from nanotrain_core.recipe import check_combination, load_recipe, resolve_recipe
from nanotrain_core.recipe.schedule_checks import expect_one_step
from nanotrain_core.registry.discovery import PluginArguments
from nanotrain_core.registry.registry import load_plugins

DDP = '[[parallel]]\nuse = "ddp"\n'

PLUGIN = """
import attrs
from nanotrain_core import hookimpl
from nanotrain_core.component import Component, Support
from nanotrain_core.errors import Problem

@attrs.define(frozen=True)
class Config:
    level: int = 1

def check(recipe, config, layout):
    if config.level > layout.world_size:
        yield Problem("parallel.0.level", f"level {config.level} exceeds {layout.world_size} ranks")

@hookimpl
def nanotrain_register_parallel(register):
    def add(name, **facts):
        register(Component(name=name, config=Config, factory="json:Thing", **facts))

    add("splits", mesh_dims={"tp", "ep"})
    add("syncs", provides={"gradient_sync"})
    add("needs", requires={"magic"})
    add("makes", provides={"magic"})
    add("hates", conflicts={"magic", "parallel:splits"})
    add("checks", check=check)
    add("alone", supports={"dp": Support.UNSUPPORTED, "tp": Support.PARTIAL})
"""


def reasons(tmp_path, *uses, text=SMALL, blocked=(), **arguments) -> list[str]:
    """Return the problems of a recipe with these parallel components; empty if it can run."""
    plugin = tmp_path / "combine_plugin.py"
    plugin.write_text(PLUGIN)
    text += "".join(f'[[parallel]]\nuse = "{use}"\n' for use in uses)
    try:
        plugins = PluginArguments(local=[str(plugin)], blocked=blocked)
        load_recipe(write(tmp_path, text), plugins=plugins, **arguments)
    except RecipeError as error:
        return [line.replace(f"{tmp_path}/", "") for line in error.lines]
    return []


def test_layout_of_a_good_recipe_is_returned(tmp_path):
    found = resolve_recipe(write(tmp_path, SMALL + DDP), ranks=4)
    assert check_combination(found.recipe, load_plugins()) == found.layout
    assert isinstance(found.layout, Layout)
    assert found.layout.size("dp") == 4


def test_ranks_that_the_degrees_do_not_divide_are_refused(tmp_path):
    (line,) = reasons(tmp_path, "splits", ranks=3, overrides=["topology.tp=2"])
    assert line.startswith("--nproc: run.ranks: 3 ranks do not fit [topology]: pp 1 x cp 1 x tp 2 = 2")
    assert line.endswith("2 or 4 ranks would do")


def test_batch_with_less_than_a_sequence_for_each_rank_names_the_nearest(tmp_path):
    (line,) = reasons(tmp_path, "syncs", ranks=9)
    text = "batch.sequences: 8 would leave some of dp = 9 ranks without a sequence; nearest: 9"
    assert line == f"recipe.toml:5: {text}"


def test_a_batch_need_not_divide(tmp_path):
    assert reasons(tmp_path, "syncs", ranks=3) == []
    assert reasons(tmp_path, overrides=["batch.sequences=7"]) == []


def test_rows_are_divided_over_dp_alone(tmp_path):
    assert reasons(tmp_path, "syncs", "splits", ranks=16, overrides=["topology.tp=4"]) == []


def test_data_parallel_ranks_need_no_gradient_sync_but_are_told_of_a_faster_one(tmp_path):
    assert reasons(tmp_path, ranks=2) == []
    (note,) = resolve_recipe(write(tmp_path, SMALL), ranks=2).notes
    assert note.startswith("dp = 2: gradients are summed after backward; ")
    assert 'parallel "ddp"' in note
    assert resolve_recipe(write(tmp_path, SMALL), ranks=1).notes == ()
    assert resolve_recipe(write(tmp_path, SMALL + DDP), ranks=2).notes == ()
    tensor = SMALL + '[topology]\ntp = 2\n[[parallel]]\nuse = "tp"\n'
    assert resolve_recipe(write(tmp_path, tensor), ranks=2).notes == (), "edp is 2, but there are no experts"


def test_ranks_along_any_dimension_need_no_gradient_sync(tmp_path):
    for degrees in (["topology.tp=2"], ["topology.tp=4", "topology.ep=2"]):
        ranks = int(degrees[0][-1])
        assert reasons(tmp_path, "splits", ranks=ranks, overrides=degrees) == []
        assert reasons(tmp_path, "splits", "syncs", ranks=ranks, overrides=degrees) == []


def test_dimension_that_no_component_handles_is_refused(tmp_path):
    (line,) = reasons(tmp_path, "splits", ranks=2, overrides=["topology.pp=2"])
    assert line.startswith(
        "--set #1: topology.pp: pp = 2, but no component of this recipe handles pp; "
        "write [schedule] with use = "
    )
    assert '"1f1b" or ' in line
    assert line.endswith(", or set pp = 1")
    (line,) = reasons(tmp_path, ranks=2, overrides=["topology.tp=2"])
    assert '; write [[parallel]] with use = "splits"' in line


def test_dimension_that_nothing_installed_handles_is_refused_without_a_false_remedy(tmp_path):
    (line,) = reasons(tmp_path, "syncs", ranks=2, overrides=["topology.cp=2"], blocked=["cp"])
    assert line.endswith("handles cp; nor does an installed one: set cp = 1")
    (line,) = reasons(tmp_path, "syncs", ranks=2, overrides=["topology.ep=2"])
    assert line.endswith("handles ep; nor has model 'transformer' experts: set ep = 1")


def test_a_dimension_that_a_component_declares_not_to_support_is_refused(tmp_path):
    """The harness alone had read what is declared."""
    dp = ["recipe.toml: topology.dp: dp = 2, and parallel 'alone' declares that it does not support it"]
    assert reasons(tmp_path, "splits", "alone", ranks=2) == dp
    assert reasons(tmp_path, "splits", "alone", ranks=2, overrides=["topology.tp=2"]) == []
    assert reasons(tmp_path, "splits", "alone", ranks=1) == []


def test_two_providers_of_gradient_sync_are_refused_and_named(tmp_path):
    (line,) = reasons(tmp_path, "ddp", "syncs")
    assert line.startswith(
        "recipe.toml:17: parallel.1: parallel 'ddp' and parallel 'syncs' both provide gradient_sync"
    )


def test_missing_capability_names_who_provides_it(tmp_path):
    (line,) = reasons(tmp_path, "needs")
    assert line.endswith(
        "parallel 'needs' needs magic; installed components that provide it: parallel \"makes\""
    )
    assert reasons(tmp_path, "needs", "makes") == []


def test_conflicts_by_capability_and_by_name_are_refused(tmp_path):
    assert (
        "cannot be combined with parallel 'makes', which provides magic"
        in reasons(tmp_path, "hates", "makes")[0]
    )
    assert reasons(tmp_path, "splits", "hates")[0].endswith("cannot be combined with parallel 'splits'")
    assert reasons(tmp_path, "hates") == []


def test_cross_check_of_a_component_sees_recipe_config_and_layout(tmp_path):
    assert reasons(tmp_path, "checks") == []
    (line,) = reasons(tmp_path, "checks", overrides=["parallel.0.level=2"])
    assert line == "--set #1: parallel.0.level: level 2 exceeds 1 ranks"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.heads=5", "model.heads: 5 heads do not divide width 32"),
        ("model.kv_heads=3", "model.kv_heads: 3 kv_heads do not divide 4 heads"),
        ("model.head_size=3", "model.heads: RoPE turns pairs"),
        ("model.positions=learned", "model.max_length: learned positions need max_length"),
        ("model.max_length=8", "batch.length: 16 exceeds model.max_length = 8"),
    ],
)
def test_transformer_checks_what_one_field_cannot(tmp_path, override, expected):
    assert any(expected in line for line in reasons(tmp_path, overrides=[override]))


def test_broken_local_plugin_is_refused_at_once(tmp_path):
    plugin = tmp_path / "bad_plugin.py"
    plugin.write_text("1 / 0")
    with pytest.raises(PluginError, match=r"bad_plugin\.py: ZeroDivisionError"):
        load_recipe(write(tmp_path), plugins=PluginArguments(local=[str(plugin)]))


def test_a_decay_that_would_begin_during_warm_up_is_refused(tmp_path):
    schedule = '[optimizer.lr_schedule]\nuse = "linear"\nwarmup_steps = 10\ndecay_steps = 200\n'
    (found,) = reasons(tmp_path, text=SMALL + schedule)
    assert "10 steps of warm-up and 200 of decay do not fit into a run of " in found


PIPELINE = SMALL + '[topology]\npp = 2\n[schedule]\nuse = "interleaved_1f1b"\nv = 2\n'


def test_layers_that_cannot_be_split_into_stages_are_refused(tmp_path):
    (line,) = reasons(tmp_path, text=PIPELINE, ranks=2)
    assert line == (
        "recipe.toml:17: schedule: 'interleaved_1f1b': "
        "2 layers cannot fill 4 stages (pp 2 x 2 on each rank): "
        "at most pp = 1, or at most v = 1, or list [schedule] layers, where a stage may have 0"
    )
    assert reasons(tmp_path, text=PIPELINE, ranks=2, overrides=["model.layers=4"]) == []
    (line,) = reasons(tmp_path, text=PIPELINE, ranks=2, overrides=["schedule.layers=[1, 0, 0, 2]"])
    assert "layers = [1, 0, 0, 2] adds up to 3; expected 2, the model's layers; [1, 0, 0, 1] would do" in line
    assert reasons(tmp_path, text=PIPELINE, ranks=2, overrides=["schedule.layers=[1, 0, 0, 1]"]) == []


SCHEDULE = """
import attrs
from nanotrain_core import hookimpl
from nanotrain_core.pipeline.actions import Action, parts_between
from nanotrain_core.component import Component

@attrs.define(frozen=True)
class Config:
    pass

@hookimpl
def nanotrain_register_schedule(register):
    register(Component(name="wrong", config=Config, factory=f"{__name__}:Wrong", mesh_dims={"pp"}))

class Wrong:
    def __init__(self, config):
        pass

    def parts(self, costs, pp):
        layers = len(costs.layers)
        return parts_between([layers * rank // pp for rank in range(pp + 1)], range(pp))

    def actions(self, pp, microbatches):
        lists = [[Action(k, s, m) for k in "FB" for m in range(microbatches)] for s in range(pp)]
        raise WHAT
"""


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (
            "ValueError('an even number of microbatches')",
            RecipeError,
            "'wrong': an even number of microbatches",
        ),
        ("KeyError('m')", PluginError, "schedule 'wrong' raised KeyError: 'm'"),
    ],
    ids=["refuses", "breaks"],
)
def test_a_schedule_that_does_not_exist_for_so_many_microbatches(tmp_path, error, raised, text):
    plugin = tmp_path / f"schedule_{raised.__name__}.py"
    plugin.write_text(SCHEDULE.replace("WHAT", error))
    with pytest.raises(raised, match="wrong") as caught:
        load_recipe(
            write(tmp_path, SMALL + '[schedule]\nuse = "wrong"\n'),
            plugins=PluginArguments(local=[str(plugin)]),
        )
    assert text in str(caught.value)


def of_schedule(folder, name, change):
    """Load a recipe over pp 2 whose schedule, sound before it, makes ``change`` to its parts or lists."""
    source = SCHEDULE.replace("layers * rank // pp", change) if "rank" in change else SCHEDULE
    action = change if "lists" in change else "pass"
    (folder / f"{name}.py").write_text(source.replace("raise WHAT", f"{action}\n        return lists"))
    text = (
        SMALL.replace("microbatch = 2", "microbatch = 4") + '[schedule]\nuse = "wrong"\n[topology]\npp = 2\n'
    )
    plugins = PluginArguments(local=[str(folder / f"{name}.py")])
    return load_recipe(write(folder, text), plugins=plugins, ranks=2)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("lost", "lists[0].pop()", "rank 0 lacks B0.1"),
        ("alien", "lists[1].append(Action('W', 0, 0))", "rank 1 has what is not its own: W0.0"),
        ("twice", "lists[1].append(Action('B', 1, 1))", "rank 1 has more than once B1.1"),
        ("stuck", "lists[0].reverse()", "no rank can go on; they wait to run rank 0: B0.1, rank 1: F1.0"),
        (
            "order",
            "lists[1][:2] = lists[1][1::-1]",
            "stage 0 runs F of [0, 1], stage 1 of [1, 0]; expected one",
        ),
        ("short", "lists.pop()", "it has actions for 1 ranks; expected pp = 2"),
        ("parts", "rank // 2", "its stages hold layers [0]; expected 0 to 2 - 1, each once, in order"),
    ],
)
def test_a_schedule_that_makes_up_no_step_is_refused_before_anything_runs(tmp_path, name, change, text):
    assert of_schedule(tmp_path, f"sound_{name}", "layers * rank // pp").schedule.use == "wrong"
    with pytest.raises(RecipeError) as caught:
        of_schedule(tmp_path, name, change)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("ramp", "told"),
    [
        ("start = 8, end = 64, by = 8", []),
        ("start = 64, end = 8, by = 8", []),
        ("start = 8, end = 64, by = 4", ["(3 microbatches: a batch of 12 sequences in the ramp)"]),
        ("start = 64, end = 8, by = 4", ["(3 microbatches: a batch of 12 sequences in the ramp)"]),
        ("start = 8, end = 2_000_000, by = 4", ["at most 16,384"]),
    ],
)
def test_a_schedule_is_asked_for_the_sizes_that_a_growing_batch_takes_between(tmp_path, ramp, told):
    source = SCHEDULE.replace("raise WHAT", "if microbatches % pp:\n            raise ValueError('uneven')")
    (tmp_path / "even.py").write_text(source + "        return lists\n")
    text = (
        SMALL.replace("microbatch = 2", "microbatch = 4") + '[schedule]\nuse = "wrong"\n[topology]\npp = 2\n'
    )
    text += f"[[phase]]\nuntil_tokens = 1_000_000\nbatch.sequences = {{ {ramp} }}\n"
    plugins = PluginArguments(local=[str(tmp_path / "even.py")])
    lines = []
    try:
        load_recipe(write(tmp_path, text), plugins=plugins, ranks=2)
    except RecipeError as error:
        lines = error.lines
    assert len(lines) == len(told)
    assert all(text in line for text, line in zip(told, lines, strict=True))


@pytest.mark.parametrize("wrong", [{"has_head": False}, {"rank": 1}], ids=["no head", "nobody's rank"])
def test_stages_without_their_ends_or_with_a_rank_that_is_not_there_are_refused(wrong):
    schedule = mock.Mock(spec_set=["parts", "actions"])
    schedule.parts.return_value = (attrs.evolve(Part.whole(2), **wrong),)
    schedule.actions.return_value = ((Action("F", 0, 0), Action("B", 0, 0)),)
    with pytest.raises(ValueError, match=r"its stages are Part\(first=0, .*; expected Part\(first=0"):
        expect_one_step(schedule, layers=2, pp=1, microbatches=1)


@pytest.mark.parametrize(
    ("monitors", "told"), [(["replicas"], 1), ([], 0), (["replicas", "console"], 0), (["jsonl"], 0)]
)
def test_a_run_whose_monitors_neither_print_nor_record_is_told(tmp_path, monitors, told):
    text = SMALL + "".join(f'[[monitor]]\nuse = "{use}"\n' for use in monitors)
    notes = resolve_recipe(write(tmp_path, text if monitors else "monitor = []\n" + text), ranks=1).notes
    assert len(notes) == told
    assert all('add [[monitor]] use = "console" and "jsonl"' in note for note in notes)


def test_the_console_shows_metrics_that_something_publishes(tmp_path):
    text = SMALL + '[[monitor]]\nuse = "console"\nmetrics = ["loss", "los"]\n'
    with pytest.raises(RecipeError) as caught:
        resolve_recipe(write(tmp_path, text), ranks=1)
    (line,) = caught.value.lines
    assert "monitor.0.metrics: nothing in this recipe publishes the metric 'los' (did you mean 'loss" in line
