"""``nanotrain explain`` on recipes of the core: numbers are those of objects, sentences have sources."""

import re
from operator import attrgetter
from pathlib import Path

import attrs
import pytest
from explained import PHASES, TINY, explained, value
from nanotrain_plan.dry.origin import Origin
from nanotrain_plan.explain.purposes import PURPOSES, purpose, quoted
from nanotrain_plan.rendering.parts import Section, Table, say
from nanotrain_plan.rendering.terminal import plain_console, show

from nanotrain_core.cli import main
from nanotrain_core.layout import gradients
from nanotrain_core.models import cross_entropy
from nanotrain_core.moe import routing
from nanotrain_core.optim import grad_norm
from nanotrain_core.pipeline import p2p
from nanotrain_core.run import global_metrics

#: Elements of the model: embedding and head, and of each layer attention, SwiGLU and two norms; a last norm.
ELEMENTS = 2 * 64 * 32 + 3 * (4 * 32 * 32 + 3 * 32 * 128 + 2 * 32) + 32


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


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


def test_a_frozen_matrix_has_no_gradient_to_sum(tmp_path, capsys):
    pytest.importorskip("nanotrain_lora")
    path = tmp_path / "lora.toml"
    path.write_text(TINY + '[[parallel]]\nuse = "lora"\ntargets = ["q"]\n')
    _, told, _ = explained(capsys, str(path))
    (table,) = [each for each in told["Who holds which part of which matrix"]["tables"] if each["rows"]]
    summed = {row[0]: row[-1] for row in table["rows"]}
    assert summed["layers.*.attn.q.lora_a"] == summed["layers.*.attn.q.lora_b"] == "dp"
    assert {to for name, to in summed.items() if "lora" not in name} == {"no gradient"}


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
    assert purpose("the core", attrs.evolve(origin, name="balance_routers")) == PURPOSES["balance_routers"]
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


@pytest.mark.full
def test_a_step_is_that_of_the_largest_batch_of_the_phases(tmp_path, capsys):
    path = tmp_path / "phases.toml"
    path.write_text(TINY.replace("steps = 10\n", "") + PHASES.replace("60_000", "16"))
    code, told, whole = explained(capsys, str(path), "--trace", "--set", "model.layers=1")
    assert code == 0
    assert whole["trace"]["same"]
    assert value(told["The batch"], "sequences") == 16
    assert value(told["The batch"], "phases") == 2


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
