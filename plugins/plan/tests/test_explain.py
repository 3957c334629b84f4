"""``nanotrain explain`` on recipes of the core: numbers are those of objects, sentences have sources."""

import argparse
import json
import os
import re
import shlex
from operator import attrgetter
from pathlib import Path

import attrs
import pytest
from nanotrain_plan.dry.origin import Origin
from nanotrain_plan.dry.real import real_recipe, record_step
from nanotrain_plan.explain import trace
from nanotrain_plan.explain.purposes import PURPOSES, purpose, quoted
from nanotrain_plan.rendering.file import check_page, write_page
from nanotrain_plan.rendering.parts import Section, Table, say
from nanotrain_plan.rendering.terminal import plain_console, show

from nanotrain_core.api import HostMemory, NanotrainError
from nanotrain_core.cli import main
from nanotrain_core.layout import gradients
from nanotrain_core.models import cross_entropy
from nanotrain_core.moe import routing
from nanotrain_core.optim import grad_norm
from nanotrain_core.pipeline import p2p
from nanotrain_core.recipe.load import resolve_recipe
from nanotrain_core.run import global_metrics
from nanotrain_core.testing import run_ranks

TINY = """
[run]
name = "tiny"
steps = 10
ranks = 2
[batch]
sequences = 8
microbatch = 2
length = 16
[model]
use = "transformer"
layers = 3
width = 32
heads = 4
vocab = 64
[[parallel]]
use = "recompute"
[data]
use = "synthetic"
vocab = 64
"""

#: Elements of the model: embedding and head, and of each layer attention, SwiGLU and two norms; a last norm.
ELEMENTS = 2 * 64 * 32 + 3 * (4 * 32 * 32 + 3 * 32 * 128 + 2 * 32) + 32


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


def explained(capsys, *words):
    code = main(["explain", *words, "--json"])
    told = json.loads(capsys.readouterr().out)
    return code, {section["title"]: section for section in told["sections"]}, told


def value(section, name):
    """Return the first value of that name in the sentences of a section."""
    return next(each["values"][name] for each in section["statements"] if name in each["values"])


def test_numbers_are_those_of_arithmetic(recipe, capsys):
    code, told, _ = explained(capsys, recipe, "--on", "cpu")
    assert code == 0
    assert value(told["The ranks"], "ranks") == 2
    holdings = told["Who holds which part of which matrix"]
    assert (value(holdings, "held"), value(holdings, "whole")) == (ELEMENTS, ELEMENTS)
    rows = {row[0]: row for row in holdings["tables"][0]["rows"]}
    assert rows["layers.*.ffn.gate.weight"][1:4] == [3, [128, 32], [128, 32]]
    batch = told["The batch"]["statements"][0]["values"]
    assert (batch["tokens"], batch["microbatches"]) == (8 * 16, 2)
    # The core sums gradients after backward: all of them in float32, a norm of float64, and counts of tokens.
    exchanges = {(row[0], row[1]): row for row in told["Communication"]["tables"][0]["rows"]}
    assert exchanges["in gradient sync, after backward", "all-reduce"][5] == 4 * ELEMENTS
    assert exchanges["in the optimizer step", "all-reduce"][4:6] == [1, 8]
    assert value(told["What is kept of each parameter"], "updated") == ELEMENTS
    # Layers are computed again until all is there that backward needs: not their last product.
    computed = told["What is computed, in which precision"]["statements"][0]["values"]
    tokens, matrices = 64, 4 * 32 * 32 + 2 * 32 * 128
    attention = 2 * 2 * 16 * 32 * tokens
    assert computed["again"] == 3 * (2 * matrices * tokens + attention)


def test_what_selective_checkpointing_computes_again_is_no_product(tmp_path, capsys):
    path = tmp_path / "selective.toml"
    path.write_text(TINY.replace('use = "recompute"', 'use = "recompute"\ngranularity = "selective"'))
    _, told, _ = explained(capsys, str(path))
    first = told["What is computed, in which precision"]["statements"][0]
    assert "again" not in first["values"]
    assert first["values"]["modules"].startswith("layers.*.attn_norm and ")
    assert "makes no matrix product" in first["text"]


def test_an_optimizer_without_state_has_none_in_its_checkpoints(tmp_path, capsys):
    path = tmp_path / "sgd.toml"
    path.write_text(TINY + '[optimizer]\nuse = "sgd"\nlr = 0.1\n')
    _, told, _ = explained(capsys, str(path), "--on", "cpu")
    (saved,) = told["What a checkpoint holds"]["statements"]
    assert "of every parameter its weight, each block once" in saved["text"]
    assert not any(
        each["columns"][0] == "optimizer state" for each in told["What is kept of each parameter"]["tables"]
    )


def test_every_sentence_is_of_values_and_has_a_file_that_is_there(recipe, capsys):
    _, told, _ = explained(capsys, recipe)
    for section in told.values():
        for each in section["statements"]:
            for source in each["sources"]:
                lines = Path(source["file"]).read_text(encoding="utf-8").splitlines()
                assert 0 < source["line"] <= len(lines)
                assert source["label"].endswith(f"{Path(source['file']).name}:{source['line']}")
                if section["title"] != "Communication":  # whose lines are those of calls
                    name = source["name"].rpartition(".")[2]
                    assert re.match(rf"\s*(class|def) {name}\b", lines[source["line"] - 1]), source
            assert each["sources"], each["text"]


def test_what_components_say_of_themselves_is_said_by_them(tmp_path, capsys):
    """The schedule of how it cuts stages, the precision of every module; not one of what the other did."""
    pytest.importorskip("nanotrain_pp_1f1b")
    pytest.importorskip("nanotrain_fp8_deepseek_v3")
    path = tmp_path / "fp8.toml"
    pipeline = '[topology]\nuse = "grid"\npp = 2\n[schedule]\nuse = "1f1b"\n'
    path.write_text(TINY + pipeline + '[precision]\nuse = "fp8_deepseek_v3"\n')
    _, told, _ = explained(capsys, str(path))
    (stages,) = [each for each in told["The layers"]["statements"] if each["text"].startswith("stages ")]
    assert [source["name"] for source in stages["sources"]] == ["Pipeline.parts"]
    statements = told["What is computed, in which precision"]["statements"]
    assert not any(each["text"].startswith("stages ") for each in statements)
    lines = [each for each in statements if re.match(r" +layers|GEMM format of each module", each["text"])]
    assert len(lines) > 5
    for each in lines:
        assert [source["name"] for source in each["sources"]] == ["ByModule.describe"]
    again = next(each for each in statements if "a second time" in each["text"])
    assert [source["name"] for source in again["sources"]] == ["Recompute.apply"]


def test_a_number_that_is_no_value_is_refused():
    with pytest.raises(AssertionError, match="no value"):
        say("There are 4 ranks.")


def test_who_calls_a_collective_is_read_from_the_stack(recipe, capsys):
    _, told, _ = explained(capsys, recipe, "--on", "cpu")
    (norm,) = [
        each
        for each in told["Communication"]["statements"]
        if each["text"].startswith("In the optimizer step")
    ]
    (source,) = norm["sources"]
    assert source["name"] == "GlobalNorm.of"
    line = Path(source["file"]).read_text().splitlines()[source["line"] - 1]
    assert "all_reduce" in line


def test_sentences_say_what_exchanges_are_for(recipe, capsys):
    """The core's are told in words for readers, and no sentence has the markup of a docstring."""
    for on, library in (("cpu", "gloo"), ("gpu", "NCCL")):
        _, told, _ = explained(capsys, recipe, "--on", on)
        texts = [each["text"] for each in told["Communication"]["statements"]]
        assert texts[0].startswith("Collectives are operations in which all ranks of a group take part. On ")
        assert f"which calls {library}: " in texts[0]
        (synced,) = [text for text in texts if text.startswith("In gradient sync, after backward")]
        why = "data ranks saw different sequences, and their gradients are added up."
        assert synced.endswith(f"The core calls it in AllReduceGradients.finish: {why}")
        for section in told.values():
            for each in section["statements"]:
                assert not re.search(r"async_op|``|:\w+:|: [A-Z]", each["text"]), each["text"]


def test_every_purpose_is_of_a_function_of_the_core():
    owners = (gradients, grad_norm, p2p, cross_entropy, routing, global_metrics)
    for name in PURPOSES:
        (found,) = [module for module in owners if hasattr(module, name.partition(".")[0])]
        assert callable(attrgetter(name)(found))


def test_what_others_wrote_is_quoted():
    origin = Origin("file.py", 1, "Bucket.start", "Begin to add up.")
    assert purpose("parallel 'ddp'", origin) == quoted(origin) == '"Begin to add up."'
    assert purpose("the core", origin) == '"Begin to add up."'
    assert purpose("the core", attrs.evolve(origin, name="balance")) == PURPOSES["balance"]
    assert quoted(None) == purpose("the core", attrs.evolve(origin, text="")) == ""


def test_a_terminal_and_a_page_have_the_same_sentences(recipe, tmp_path, capsys):
    path = tmp_path / "tiny.html"
    assert main(["explain", recipe, "--html", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.endswith(f"page: {path}")
    text = path.read_text()
    for sentence in ("The run has 2 ranks:", "In the optimizer step, rank 0 with 1: all-reduce along dp"):
        assert sentence in out
        assert sentence in text
    assert text.count("<svg") == 3  # ranks, the pipeline, communication
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")


def test_a_pipe_gets_all_rows_and_no_word_is_markup(capsys):
    rows = [[f'[[parallel]] use = "recompute" :x: {n}'] for n in range(100)]
    show("[title]", [Section("all", [Table(("[key]",), rows)])], plain_console(140))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert {"[title]", "[key]", *(row[0] for row in rows)} <= set(lines)


def test_a_trace_is_as_predicted(recipe, capsys):
    code, told, whole = explained(capsys, recipe, "--trace", "--set", "model.layers=1")
    assert code == 0
    assert whole["trace"]["same"]
    assert all(each["sources"] for each in told["What really happened"]["statements"])
    real = whole["trace"]["ranks"][0]["real"]
    rows = told["Communication"]["tables"][0]["rows"]
    assert sum(row[4] for row in rows) == len(real)
    assert sum(row[5] for row in rows) == sum(each["bytes"] for each in real)
    assert {tuple(row[3]) for row in rows} == {tuple(each["ranks"]) for each in real}


def _told_by_ranks(recipe):
    found, told = resolve_recipe(recipe), []
    record_step(real_recipe(found.recipe, found.registry), found.registry, told.append)
    return told


@pytest.mark.full
def test_a_trace_tells_what_it_does_meanwhile(recipe, capsys):
    """Its ranks are forked from a server, which has another stderr than a test."""
    assert main(["explain", recipe, "--trace", "--set", "model.layers=1"]) == 0
    err = capsys.readouterr().err
    assert re.findall(r"nanotrain: +\d+ s: (.*)", err) == [
        "explaining the recipe from a dry step",
        "predicting a step of 2 ranks",
        "starting 2 processes, which import torch and meet",
        "comparing the collectives of all ranks",
    ]
    assert run_ranks(_told_by_ranks, 2, recipe) == [["step 1 of 2", "step 2 of 2"]] * 2


def smaller(capsys, *words):
    """Return the overrides that are suggested in place of a recipe that is too large for a trace."""
    assert main(["explain", *words, "--trace"]) == 2
    advice = capsys.readouterr().err.splitlines()[-1]
    changes = [change.split("=", 1) for change in shlex.split(advice.partition(" --trace ")[2])[1::2]]
    assert len(dict(changes)) == len(changes), "an option twice"
    return dict(changes)


def test_of_too_many_ranks_the_fewest_with_all_axes_are_suggested(recipe, capsys):
    many = ["--set", "run.ranks=64", "--set", "batch.sequences=64"]
    assert smaller(capsys, recipe, *many) == {"batch.sequences": "8", "run.ranks": "2"}
    sharded = ["--set", "topology.tp=4", "--set", 'parallel=[{use="tp"}, {use="ddp"}]']
    found = smaller(capsys, recipe, *many, *sharded)
    assert (found["run.ranks"], found["topology.tp"]) == ("4", "2")


def test_what_is_suggested_takes_seconds(recipe, capsys):
    """Fewer kinds of tokens, shorter sequences; steps only where phases alone said how many."""
    large = ["--set", "model.vocab=50000", "--set", "data.vocab=50000", "--set", "batch.length=4096"]
    found = smaller(capsys, recipe, *large, "--set", "run.ranks=64", "--set", "batch.sequences=64")
    assert {key: found[key] for key in ("model.vocab", "data.vocab", "batch.length")} == {
        "model.vocab": "1024",
        "data.vocab": "1024",
        "batch.length": "64",
    }
    assert "run.steps" not in found


def test_a_trace_that_differs_says_where_and_ends_with_2(recipe, capsys, monkeypatch):
    predict = trace.predict

    def one_less(*args):
        found = predict(*args)
        del found[1].collectives[0]
        return found

    monkeypatch.setattr(trace, "predict", one_less)
    code, told, whole = explained(capsys, recipe, "--trace", "--set", "model.layers=1")
    assert code == 2
    assert not whole["trace"]["same"]
    assert [each["first_difference"] for each in whole["trace"]["ranks"]] == [None, 0]
    texts = [each["text"] for each in told["What really happened"]["statements"]]
    assert any(text.startswith("Rank 1: number 1 differs") for text in texts)


@pytest.mark.full
def test_what_is_too_large_to_trace_is_told_a_smaller_recipe(recipe, capsys, monkeypatch):
    assert main(["explain", recipe, "--trace", "--nproc", "64", "--set", "batch.sequences=64"]) == 2
    err = capsys.readouterr().err
    assert "64 ranks are too many for one machine; at most 16" in err
    monkeypatch.setattr("nanotrain_plan.explain.shrink.host_memory", lambda: HostMemory(1_000_000))
    assert main(["explain", recipe, "--trace"]) == 2
    problem, advice = (line for line in capsys.readouterr().err.splitlines() if "--trace" in line)
    assert "training takes some" in problem
    words = shlex.split(advice.partition("nanotrain explain ")[2])
    code, _, whole = explained(capsys, *words)
    assert code == 0
    assert whole["trace"]["same"]


@pytest.mark.parametrize("bytes_of_memory", [pytest.param(None, marks=pytest.mark.full), 1_000_000])
def test_a_trace_without_the_recipes_data_is_told_one_on_synthetic_data(
    bytes_of_memory, tmp_path, capsys, monkeypatch
):
    path = tmp_path / "text.toml"
    data = '[data]\nuse = "text"\npaths = ["corpus"]\n'
    path.write_text(TINY.partition("[data]")[0].replace("vocab = 64", "vocab = 256") + data)
    if bytes_of_memory:
        monkeypatch.setattr("nanotrain_plan.explain.shrink.host_memory", lambda: HostMemory(bytes_of_memory))
    assert main(["explain", str(path), "--trace"]) == 2
    problem, advice = (line for line in capsys.readouterr().err.splitlines() if "--trace" in line)
    told = "training takes some" if bytes_of_memory else f"data path {tmp_path / 'corpus'} does not exist"
    assert told in problem
    code, _, whole = explained(capsys, *shlex.split(advice.partition("nanotrain explain ")[2]))
    assert code == 0
    assert whole["trace"]["same"]


PHASES = """
[[phase]]
until_tokens = 10_000_000
batch.sequences = { start = 8, end = 60_000 }
[[phase]]
until_tokens = 20_000_000
"""


@pytest.mark.full
def test_a_step_is_that_of_the_largest_batch_of_the_phases(tmp_path, capsys):
    path = tmp_path / "phases.toml"
    path.write_text(TINY.replace("steps = 10\n", "") + PHASES.replace("60_000", "16"))
    code, told, whole = explained(capsys, str(path), "--trace", "--set", "model.layers=1")
    assert code == 0
    assert whole["trace"]["same"]
    assert value(told["The batch"], "sequences") == 16
    assert value(told["The batch"], "phases") == 2


@pytest.mark.full  # the test above has phases, too
def test_a_smaller_recipe_has_no_phases_that_set_another_batch(tmp_path, capsys):
    path = tmp_path / "phases.toml"
    path.write_text(TINY.replace("steps = 10\n", "").replace("width = 32", "width = 512") + PHASES)
    assert main(["explain", str(path), "--trace"]) == 2
    problem, advice = (line for line in capsys.readouterr().err.splitlines() if "--trace" in line)
    assert "two steps of 60,000 sequences take some" in problem
    words = shlex.split(advice.partition("nanotrain explain ")[2])
    code, told, whole = explained(capsys, *words)
    assert code == 0
    assert whole["trace"]["same"]
    assert value(told["The batch"], "sequences") == 8
    assert "run.steps=2" in words  # the file has none


@pytest.mark.parametrize("command", ["explain", "plan", "inspect"])
def test_no_page_takes_the_place_of_the_recipe(command, recipe, capsys):
    if command == "inspect":
        pytest.importorskip("nanotrain_inspect")
    assert main([command, recipe, "--html", recipe]) == 2
    told = f"nanotrain: --html {recipe}: this is the recipe, which would be lost\n"
    assert capsys.readouterr().err == told
    assert Path(recipe).read_text() == TINY


@pytest.mark.parametrize("command", ["explain", "plan", "inspect"])
def test_no_page_takes_the_place_of_a_pipe(command, recipe, tmp_path, capsys):
    if command == "inspect":
        pytest.importorskip("nanotrain_inspect")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main([command, recipe, "--html", str(pipe)]) == 2
    told = f"nanotrain: --html {pipe}: expected a file, this is a device, pipe or socket\n"
    assert capsys.readouterr().err == told
    assert pipe.is_fifo()


def test_a_page_is_written_through_a_symbolic_link(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "page.html", tmp_path / "page.html"
    target.write_text("old")
    link.symlink_to("there/page.html")
    args = argparse.Namespace(html=str(link), recipe="laptop")
    check_page(args)
    write_page(args, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_page_behind_a_link_into_a_missing_folder_is_refused(tmp_path):
    link = tmp_path / "page.html"
    link.symlink_to("none/page.html")
    with pytest.raises(NanotrainError, match=r"there is no folder .*none"):
        check_page(argparse.Namespace(html=str(link), recipe="laptop"))


@pytest.mark.parametrize("command", ["explain", "plan", "inspect"])
def test_a_page_in_a_missing_folder_is_refused_at_once(command, recipe, tmp_path, capsys):
    if command == "inspect":
        pytest.importorskip("nanotrain_inspect")  # this plugin only extends that command
    assert main([command, recipe, "--html", str(tmp_path / "none" / "x.html")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"nanotrain: --html {tmp_path / 'none' / 'x.html'}: there is no folder {tmp_path / 'none'}"
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--trace", "--on", "gpu", "--set", "steps=x"], "leave out --on gpu"),  # before the recipe is read
        (["--set", "batch.microbatches=1"], "batch.microbatches"),
    ],
)
def test_mistakes_are_told_in_a_line(recipe, words, told, capsys):
    assert main(["explain", recipe, *words]) == 2
    assert told in capsys.readouterr().err


def test_offloaded_state_and_activations_are_not_counted_on_the_device(tmp_path, capsys):
    pytest.importorskip("nanotrain_zero12")
    pytest.importorskip("nanotrain_activation_offload")
    plain, moved = tmp_path / "plain.toml", tmp_path / "moved.toml"
    text = TINY.replace('[[parallel]]\nuse = "recompute"\n', '[optimizer]\nuse = "zero12"\n')
    plain.write_text(text)
    offload = '[[parallel]]\nuse = "activation_offload"\nmin_mb = 0.0\nkeep = 0\n'
    moved.write_text(text.replace("[optimizer]", offload + "[optimizer]\noffload = true"))
    (_, before, _), (_, after, _) = (explained(capsys, str(path)) for path in (plain, moved))
    kept = [value(each["The order of passes"], "kept") for each in (before, after)]
    assert 0 < kept[1] < kept[0] / 2
    texts = [each["text"] for each in after["What is kept of each parameter"]["statements"]]
    assert any("optimizer state" in each and "are offloaded to the host's memory" in each for each in texts)
    _, on_cpu, _ = explained(capsys, str(moved), "--on", "cpu")
    texts = [each["text"] for each in on_cpu["What is kept of each parameter"]["statements"]]
    assert not any("offloaded" in each for each in texts)
