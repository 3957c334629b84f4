"""``nanotrain explain``: the numbers of its JSON against real ranks, also with a plugin of a stranger."""

import json
import re
from collections import Counter
from math import prod

import pytest
import torch.distributed as dist
from test_docs import write_example

from nanotrain_core.cli import main
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.recipe.load import resolve_recipe
from nanotrain_core.testing import run_ranks

TINY = """
[run]
name = "tiny"
steps = 10
ranks = {ranks}
[batch]
sequences = 8
microbatch = 2
length = 16
[model]
use = "transformer"
layers = 4
width = 32
heads = 4
vocab = 64
[topology]
use = "grid"
{topology}
{tables}
[data]
use = "synthetic"
vocab = 64
"""

TP = '[[parallel]]\nuse = "tp"\n'
ZERO = '[optimizer]\nuse = "zero12"\nstage = {}\nbucket_mb = 0.01\n'
ONE_F_ONE_B = '[schedule]\nuse = "1f1b"\n'

RECIPES = {
    "tp_sp_zero1": (4, "tp = 2", TP + ZERO.format(1)),
    "zero2": (2, "", ZERO.format(2)),
    "tp_sp": (2, "tp = 2", TP),
    "pp_zero1": (4, "pp = 2", ONE_F_ONE_B + ZERO.format(1)),
}


def write(tmp_path, name):
    ranks, topology, tables = RECIPES[name]
    path = tmp_path / f"{name}.toml"
    path.write_text(TINY.format(ranks=ranks, topology=topology, tables=tables))
    return str(path)


def real(recipe, overrides):
    """Return what this rank really holds, keeps and updates, and its groups."""
    found = resolve_recipe(recipe, overrides=overrides)
    engine = RuntimeEngine.from_recipe(found.recipe, registry=found.registry, rank=dist.get_rank())
    run = engine.run
    shapes = {name: tuple(p.shape) for part in run.stages.values() for name, p in part.named_parameters()}
    dtypes = {str(p.dtype)[6:] for part in run.stages.values() for p in part.parameters()}
    kept = Counter()
    for block in run.optimizer.blocks():
        kept[block.name.partition("/")[0]] += block.tensor.numel() if block.tensor.dim() else 0
    groups = {dim: run.mesh.ranks(dim) for dim in run.mesh.layout.dims}
    updated = sum(piece.weight.numel() for piece in run.gradients.pieces())
    trained = {p for part in run.stages.values() for p in part.parameters() if p.requires_grad}
    return shapes, dtypes, dict(kept), groups, updated, sum(p.numel() for p in trained)


def assert_true(recipe, capsys, *overrides):
    """Hold an explanation against the objects of every rank, and its exchanges against a trace."""
    words = [word for change in overrides for word in ("--set", change)]
    code = main(["explain", recipe, "--trace", "--json", *words])
    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert told["trace"]["same"]
    without = [*overrides, "monitor=[]", 'kernels={use="torch"}']
    held = run_ranks(real, told["ranks"], recipe, without)
    sections = {section["title"]: section for section in told["sections"]}
    _assert_groups(sections["The ranks"], held)
    _assert_blocks(sections["Who holds which part of which matrix"], held)
    _assert_state(sections["What is kept of each parameter"], held)
    _assert_exchanges(sections["Communication"], told["trace"])
    return sections


def _assert_groups(section, held):
    told = [each["values"] for each in section["statements"] if "dim" in each["values"]]
    for values in told:
        assert tuple(values["ranks"]) == held[values["rank"]][3][values["dim"]]
        assert values["size"] == len(values["ranks"])
    several = {dim for dim, ranks in held[0][3].items() if len(ranks) > 1}
    assert {values["dim"] for values in told} | {"dp", "edp", "ep", "etp"} >= several


def _assert_blocks(section, held):
    totals = [each["values"] for each in section["statements"] if "held" in each["values"]]
    assert len(totals) == len(section["tables"])
    for values, table in zip(totals, section["tables"], strict=True):
        shapes, dtypes, *_ = held[values["rank"]]
        assert values["held"] == sum(map(prod, shapes.values()))
        assert values["dtypes"] == " and ".join(sorted(dtypes))
        counted = Counter()
        for _, number, _, shape, _, _ in table["rows"]:
            counted[tuple(shape)] += number
        assert counted == Counter(shapes.values())
        told = Counter((re.sub(r"\.\d+\.", ".*.", name), str(rest)) for name, _, *rest in table["rows"])
        assert set(told.values()) == {1}, "rows that say the same"
    for each in section["statements"]:
        v = each["values"]
        if "axis" in v:
            names = [name for name in held[v["rank"]][0] if alike(name, v["name"])]
            assert names
            assert {held[v["rank"]][0][name][v["axis"]] for name in names} == {v["last"] - v["first"] + 1}
            assert v["length"] == v["whole"][v["axis"]]


def alike(name, starred):
    parts = zip(name.split("."), starred.split("."), strict=False)
    return name.count(".") == starred.count(".") and all(b in ("*", a) for a, b in parts)


def _assert_state(section, held):
    updates = [each["values"] for each in section["statements"] if "updated" in each["values"]]
    for values, table in zip(updates, section["tables"], strict=True):
        _, _, kept, _, updated, trained = held[values["rank"]]
        assert values["updated"] == updated
        assert values.get("held", updated) == trained
        told = {name: size for name, _, _, size in table["rows"] if name != "step"}
        assert told == {name: 4 * number for name, number in kept.items() if name != "step"}


def _assert_exchanges(section, trace):
    totals = [
        each["values"] for each in section["statements"] if set(each["values"]) == {"rank", "count", "bytes"}
    ]
    tables = iter(section["tables"])
    for values in totals:
        happened = trace["ranks"][values["rank"]]["real"]
        assert values["count"] == len(happened)
        assert values["bytes"] == sum(each["bytes"] for each in happened)
        counts, sizes = Counter(), Counter()
        for each in happened:
            key = each["op"].replace("_", "-"), tuple(each["ranks"])
            counts[key] += 1
            sizes[key] += each["bytes"]
        told_counts, told_sizes = Counter(), Counter()
        for _, op, _, ranks, count, size, _ in next(tables)["rows"]:
            told_counts[op, tuple(ranks)] += count
            told_sizes[op, tuple(ranks)] += size
        assert (told_counts, told_sizes) == (counts, sizes)


@pytest.mark.full
def test_an_explanation_is_true(tmp_path, capsys):
    sections = assert_true(write(tmp_path, "tp_sp_zero1"), capsys)
    whose = {row[6].partition(":")[0] for row in sections["Communication"]["tables"][0]["rows"]}
    assert whose == {"the core", "parallel 'tp'", "optimizer 'zero12'"}


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_every_explanation_is_true(tmp_path, name, capsys):
    assert_true(write(tmp_path, name), capsys)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["laptop", "deepseek_4d_small", "deepseek_4d"])
def test_explanations_of_shipped_recipes_are_true(recipe, capsys):
    assert_true(recipe, capsys, "checkpoint={use='simple'}", "batch.length=32")


def test_a_plugin_that_nobody_has_heard_of_is_explained(tmp_path, capsys):
    """What it splits is read from placements, where it asks from the stack: a wrapper of docs/plugins.md."""
    plugin = write_example(tmp_path, "mini_tp.py")
    path = tmp_path / "mini.toml"
    path.write_text(TINY.format(ranks=2, topology="tp = 2", tables='[[parallel]]\nuse = "mini_tp"\n'))
    assert main(["explain", str(path), "--plugin", plugin, "--on", "cpu", "--json"]) == 0
    sections = {each["title"]: each for each in json.loads(capsys.readouterr().out)["sections"]}
    rows = {row[0]: row for row in sections["Who holds which part of which matrix"]["tables"][0]["rows"]}
    assert rows["layers.*.attn.q.weight"][2:5] == [[32, 32], [16, 32], "axis 0 over tp"]
    assert rows["layers.*.ffn.down.weight"][2:5] == [[32, 128], [32, 64], "axis 1 over tp"]
    asked = [
        (each["values"]["op"], each["sources"][0]["name"])
        for each in sections["Communication"]["statements"]
        if each["values"].get("owner") == "Parallel 'mini_tp'"
    ]
    assert asked
    for each in sections["Communication"]["statements"]:
        if each["values"].get("owner") == "Parallel 'mini_tp'":
            assert each["sources"][0]["file"] == plugin


@pytest.mark.full
def test_masters_that_read_their_weights_when_they_are_made_are_explained(tmp_path, capsys):
    """Ranks along tp are composed to tell their blocks from another's, without numbers to read."""
    recipe = write(tmp_path, "tp_sp")
    assert main(["explain", recipe, "--set", "precision.use=fp4_master", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert any("master" in json.dumps(section) for section in told["sections"])
