"""``nanotrain eval``: losses by their definition, tasks through ``lm_eval`` itself, and what is refused."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from nanotrain_sample import ranks
from nanotrain_sample.evaluate import output, tasks
from nanotrain_sample.evaluate.measure import Measured, read_text
from nanotrain_sample.evaluate.scorer import Score
from nanotrain_sample.evaluate.windows import windows
from nanotrain_sample.source import note_length
from rich.console import Console

from nanotrain_core.api.text import make_tokenizer
from nanotrain_core.batch import Batch
from nanotrain_core.cli import main
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

MODEL = {
    **{"use": "transformer", "layers": 2, "width": 32, "heads": 4, "init_std": 0.2},
    **{"vocab": 300, "positions": "learned", "max_length": 48},
}
TEXT = "It was the best of times, it was the worst of times: \u00e9t\u00e9.\n" * 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "train.txt").write_text("one two three " * 60)
    (folder / "text.txt").write_text(TEXT)
    data = {"use": "text", "paths": [str(folder / "train.txt")], "suffixes": [".txt"]}
    around = {"model": MODEL, "data": data, "batch": {"sequences": 2}, "evaluation": {"sequences": 3}}
    engine = make_engine(
        Case("checkpoint", use="simple", overrides=around),
        {"run": {"steps": 1}, "monitor": [{"use": "jsonl"}]},
        folder=folder,
    )
    engine.fit()
    return folder, engine


def call(capsys, *words):
    code = main(["eval", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def found(capsys, *words):
    code, out, err = call(capsys, *words, "--json")
    assert code == 0, err
    return json.loads(out)


@torch.no_grad()
def log_probabilities(engine, context, tokens):
    """Return each token's log-probability after ``context``, and whether it is the likeliest."""
    (part,) = engine.run.stages.values()
    whole = torch.tensor([[*context, *tokens]])
    logits = part.eval()(whole[:, :-1], Batch(whole[:, :-1])).value[0, -len(tokens) :].double()
    wanted = whole[0, -len(tokens) :]
    return -F.cross_entropy(logits, wanted, reduction="none"), logits.argmax(-1) == wanted


def test_a_validation_loss_is_that_of_the_run(trained, capsys):
    folder, _ = trained
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["event"] == "evaluation"][-1]
    (text,) = found(capsys, folder)["texts"]
    assert text["tokens"] == last["tokens"]
    assert text["loss"] == pytest.approx(last["loss"], abs=1e-12)
    assert text["bits_per_byte"] == pytest.approx(last["bits_per_byte"], abs=1e-12)
    assert text["losses"] == pytest.approx(last["losses"], abs=1e-12)


@pytest.mark.parametrize("width", [40, 200])
def test_a_narrow_terminal_cuts_no_number_and_no_name(monkeypatch, capsys, width):
    """Numbers ended with an ellipsis, and names were broken in their midst."""
    monkeypatch.setattr(output, "Console", lambda width=None, w=width: Console(width=w))
    name = "a/very/long/name/of/a/file/that/no/column/holds[1].txt"
    scores = {"results": {"task": {"acc,none": 0.25, "acc_stderr,none": 0.1}}}
    terms = {"lm": 2.34567, "preference": 0.43211}
    measured = Measured(name=name, tokens=123456, loss=2.34567, bits_per_byte=1.23456, losses=terms)
    output.tell("run", "m", [measured], scores, json=False)
    out = capsys.readouterr().out
    for text in (name, "123,456", "2.3457", "10.44", "1.2346", "0.2500", "preference", "0.4321"):
        assert text in out
    assert ("  perplexity: 10.44\n" in out) == (width == 40)


@pytest.mark.parametrize(
    "words",
    [
        ("--set", "batch.length=24"),
        ("--set", "data.validation_fraction=0.5"),
        ("--set", "run.seed=3"),
        ("--set", 'data.paths=["{run}/text.txt"]'),
    ],
)
def test_another_split_than_the_one_of_the_run_is_refused(trained, capsys, words):
    """Its sequences may be among those that the run trained on."""
    folder, _ = trained
    code, _, err = call(capsys, folder, *(word.format(run=folder) for word in words))
    assert code == 2
    assert "the run trained on other data, or held out another part of it" in err
    assert "--text scores other files" in err


def test_files_may_have_moved_but_not_changed(trained, capsys, tmp_path):
    folder, _ = trained
    moved = tmp_path / "train.txt"
    moved.write_bytes((folder / "train.txt").read_bytes())
    words = (folder, "--set", f'data.paths=["{moved}"]')
    assert found(capsys, *words) == found(capsys, folder)
    moved.write_text("zero " + moved.read_text())
    code, _, err = call(capsys, *words)
    assert code == 2
    assert "the run trained on other data" in err


def test_data_without_pieces_are_the_run_s_own_in_every_phase(tmp_path, capsys):
    """Their fingerprint has the longest sequences of all phases, and a checkpoint the length of one."""
    around = {
        "data": {"use": "synthetic", "vocab": 300, "validation_sequences": 4},
        "batch": {"sequences": 2, "length": 12},
        "evaluation": {"sequences": 4, "every": 1},
        "checkpoint": {"use": "simple", "every": 1, "keep": 9},
        "phase": [{"until_tokens": 24}, {"batch": {"length": 48}}],
    }
    folder = train_in_phases(tmp_path, around, steps=2)
    losses = {step: row["loss"] for step, row in evaluations(folder).items()}
    for step in (1, 2):
        (text,) = found(capsys, folder, "--step", step)["texts"]
        assert text["loss"] == pytest.approx(losses[step], abs=1e-9), step
    code, _, err = call(capsys, folder, "--set", "run.seed=3")
    assert code == 2
    assert "the run trained on other data" in err


def train_in_phases(folder, around, steps):
    """Train on one half of a text of some 2,500 bytes, if nothing else; return the folder of the run."""
    (folder / "train.txt").write_text(" ".join(f"{number * number % 97}" for number in range(900)))
    data = {"use": "text", "paths": [str(folder / "train.txt")], "suffixes": [".txt"]}
    data["validation_fraction"] = 0.5
    engine = make_engine(
        Case("checkpoint", use="simple", overrides={"model": MODEL, "data": data, **around}),
        {"run": {"steps": steps}, "monitor": [{"use": "jsonl"}]},
        folder=folder,
    )
    engine.fit()
    return folder


def evaluations(folder):
    """Return the rows of a run's evaluations by step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if row["event"] == "evaluation"}


def test_what_is_held_out_is_the_same_in_a_phase_of_shorter_sequences(tmp_path, capsys):
    """Pieces of the longest phase are held out: with shorter ones eval read what the run trains on."""
    around = {
        "batch": {"sequences": 2, "length": 12},
        "evaluation": {"sequences": 4, "every": 1},
        "checkpoint": {"use": "simple", "every": 1, "keep": 9},
        "phase": [{"until_tokens": 48}, {"batch": {"length": 48}}],
    }
    folder = train_in_phases(tmp_path, around, steps=3)
    losses = {step: row["loss"] for step, row in evaluations(folder).items()}
    for step in (1, 3):
        (text,) = found(capsys, folder, "--step", step)["texts"]
        assert text["loss"] == pytest.approx(losses[step], abs=1e-9), step


def test_a_phase_that_sets_the_length_sets_the_batch_that_is_evaluated(tmp_path, capsys):
    """Of 10 sequences in batches of 5; then of 6 at first, 12; then of 7, 14."""
    phases = [
        {"until_tokens": 96, "batch": {"sequences": 2}},
        {"until_tokens": 250, "batch": {"length": 16, "sequences": {"start": 6, "end": 3}}},
        {"until_tokens": 400, "batch": {"sequences": 9}},
        {"batch": {"length": 12, "sequences": 7}},
    ]
    around = {"batch": {"sequences": 5, "length": 48}, "evaluation": {"sequences": 10, "every": 1}}
    checkpoint = {"use": "simple", "every": 1, "keep": 9}
    folder = train_in_phases(tmp_path, {**around, "checkpoint": checkpoint, "phase": phases}, steps=5)
    expected = evaluations(folder)
    tokens = [10 * 48, 12 * 16, 12 * 16, 12 * 16, 14 * 12]
    assert [expected[step]["tokens"] for step in range(1, 6)] == tokens
    for step in (1, 3, 4, 5):
        (text,) = found(capsys, folder, "--step", step)["texts"]
        assert text["tokens"] == expected[step]["tokens"], step
        assert text["loss"] == pytest.approx(expected[step]["loss"], abs=1e-9), step


@pytest.mark.full  # three ranks are started
def test_ranks_that_do_not_divide_the_batch_evaluate_the_same_sequences(tmp_path, capfd):
    around = {"batch": {"sequences": 4, "length": 12}, "evaluation": {"sequences": 7}}
    folder = train_in_phases(tmp_path, {**around, "checkpoint": {"use": "simple"}}, steps=1)
    row = evaluations(folder)[1]
    (text,) = found(capfd, folder, "--degree", "dp=3")["texts"]
    assert text["tokens"] == row["tokens"] == 8 * 12
    assert text["loss"] == pytest.approx(row["loss"], abs=1e-9)


def test_inside_a_shell_that_srun_has_started_the_ranks_of_the_degrees_start(trained, capsys, monkeypatch):
    """Its one task was taken for the only rank, and the degree refused."""
    one = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
    for name in (*one, "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.setenv(name, "1" if name in one else "0")
    started = []
    monkeypatch.setattr(ranks, "prepare_ranks", lambda count: None)
    monkeypatch.setattr(ranks, "start_ranks", lambda job, recipe, nodes: started.append(nodes.nproc) or 0)
    code, _, err = call(capsys, trained[0], "--degree", "dp=2")
    assert (code, err, started) == (0, "", [2])


@pytest.mark.parametrize("stride", [16, 5, 1])
def test_every_byte_of_a_file_is_scored_after_those_before_it(trained, capsys, stride):
    folder, engine = trained
    (text,) = found(capsys, folder, "--text", folder / "text.txt", "--length", 16, "--stride", stride)[
        "texts"
    ]
    content = TEXT.encode()
    total = 0.0
    for begin in range(0, len(content), stride):
        tokens = content[begin : begin + stride]
        seen = [0, *content][: begin + 1]  # byte 0 ends documents
        context = seen[len(tokens) - 1 - 16 :] if len(seen) + len(tokens) - 1 > 16 else seen
        total -= log_probabilities(engine, context, tokens)[0].sum().item()
    assert text["tokens"] == len(content)
    assert text["loss"] == pytest.approx(total / len(content), abs=1e-9)
    assert text["perplexity"] == pytest.approx(math.exp(total / len(content)), rel=1e-9)
    assert text["bits_per_byte"] == pytest.approx(total / len(content) / math.log(2), abs=1e-9)


@pytest.mark.parametrize(("content", "scored"), [("abcd", 3), ("\u00e9", 2)])
def test_a_first_token_that_is_not_scored_has_no_bytes(tmp_path, content, scored):
    """A part of a character counts with the token that completes it."""
    (tmp_path / "text.txt").write_text(content, encoding="utf-8")
    codec = make_tokenizer("bytes")
    codec.separator = None
    text = read_text(tmp_path / "text.txt", codec, 8, 8)
    bits = text.measured([Score(-scored * math.log(2), greedy=False)]).bits_per_byte
    assert bits == pytest.approx(1)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.data(), st.booleans())
def test_windows_score_each_token_once_within_the_length(count, length, data, with_start):
    stride = data.draw(st.integers(1, length))
    tokens = list(range(1, count + 1))
    asked = list(windows(tokens, length, stride, [0] if with_start else []))
    scored = [token for request in asked for token in request.tokens[-request.scored :]]
    assert scored == (tokens if with_start else tokens[1:])
    assert all(request.scored < len(request.tokens) <= length + 1 for request in asked)


QUESTIONS = [
    {"question": "one two", "choices": [" three", " seven", "?"], "answer": 0},
    {"question": "two three", "choices": [" one", " six and more", "!!"], "answer": 1},
    {"question": "three one", "choices": [" nine", "zzz", " two"], "answer": 2},
]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    rows = "".join(json.dumps(row) + "\n" for row in QUESTIONS)
    (folder / "questions.jsonl").write_text(rows)
    (folder / "tiny.yaml").write_text(
        f"""task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder / "questions.jsonl"}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""
    )
    return folder


@pytest.mark.full  # lm_eval alone takes ten seconds to import
def test_a_task_of_lm_eval_has_the_accuracy_of_its_definition(trained, task, capsys, monkeypatch):
    """acc: the likeliest choice is right; acc_norm: the likeliest by its mean over characters."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(task / "cache"))
    folder, engine = trained
    right = {"acc": 0, "acc_norm": 0}
    for row in QUESTIONS:
        logs = [
            log_probabilities(engine, row["question"].encode(), choice.encode())[0].sum().item()
            for choice in row["choices"]
        ]
        means = [log / len(choice) for log, choice in zip(logs, row["choices"], strict=True)]
        right["acc"] += max(range(3), key=logs.__getitem__) == row["answer"]
        right["acc_norm"] += max(range(3), key=means.__getitem__) == row["answer"]
    results = found(capsys, folder, "--task", "tiny_choice", "--tasks-from", task)["tasks"]
    assert {row["metric"]: row["value"] for row in results} == {
        name: pytest.approx(count / 3) for name, count in right.items()
    }
    assert {row["task"] for row in results} == {"tiny_choice"}
    code, _, err = call(capsys, folder, "--task", "tiny_chioce", "--tasks-from", task)
    assert code == 2
    assert "lm_eval knows no such task (did you mean 'tiny_choice'?)" in err
    text = (task / "tiny.yaml").read_text().replace("tiny_choice", "unasked").replace("questions.", "none.")
    (task / "unasked.yaml").write_text(text)
    code, _, err = call(capsys, folder, "--task", "unasked", "--tasks-from", task)
    assert code == 2
    assert "--task unasked: the questions cannot be read: " in err
    assert "none.jsonl" in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--length", "8"), "--length is for --text and --task"),
        (("--tasks-from", "{run}"), "--tasks-from is for --task"),
        (("--text", "{run}/text.txt", "--limit", "2"), "--limit is for --task"),
        (("--text", "{run}/nothing.txt"), "nothing.txt: there is no such file"),
        (("--text", "{run}"), "is a folder; expected a file"),
        (("--text", "{run}/text.txt", "--length", "49"), "--length 49: the model reads at most 48"),
        (
            ("--text", "{run}/text.txt", "--length", "8", "--stride", "9"),
            "--stride 9: a window has 8 tokens",
        ),
        (("--set", "evaluation.sequences=0"), "the run's recipe evaluates nothing"),
        (("--text", "{run}/empty.txt"), "there is nothing to predict in it"),
        (("--text", "{run}/bytes"), "no UTF-8 at byte 1"),
    ],
)
def test_what_cannot_be_evaluated_is_told(trained, capsys, words, expected):
    folder, _ = trained
    (folder / "empty.txt").write_text("")
    (folder / "bytes").write_bytes(b"a\xff")
    code, _, err = call(capsys, folder, *(word.format(run=folder) for word in words))
    assert code == 2
    assert expected in err


def test_windows_longer_than_the_training_sequences_are_noted(capsys):
    for length, limit, told in ((2048, None, True), (128, None, False), (2048, 4096, False)):
        note_length("windows have", length, 128, limit)
        assert ("sequences of 128 tokens, and windows have 2048" in capsys.readouterr().err) == told


def test_without_lm_eval_tasks_are_refused_with_what_to_install(trained, capsys, monkeypatch):
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    folder, _ = trained
    code, _, err = call(capsys, folder, "--task", "arc_easy")
    assert code == 2
    assert "pip install 'nanotrain-sample[tasks]'" in err
