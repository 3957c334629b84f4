"""Texts that a task asks for: greedy by definition, ended by its strings, and what is refused."""

import json

import pytest
import torch
from nanotrain_sample.evaluate.answers import Answers
from nanotrain_sample.evaluate.generation import generate, generation_of
from nanotrain_sample.evaluate.windows import Request
from nanotrain_sample.generate import Writer

from nanotrain_core.api.text import make_tokenizer
from nanotrain_core.batch import Batch
from nanotrain_core.cli import main
from nanotrain_core.errors import NanotrainError
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine, make_run

MODEL = {
    **{"use": "transformer", "layers": 2, "width": 32, "heads": 4, "init_std": 0.2},
    **{"vocab": 256, "positions": "learned", "max_length": 48},
}
CODEC = make_tokenizer("bytes")
QUESTIONS = ("one two", "three", "", "a question that is longer than what the model reads at once")


@torch.no_grad()
def greedy(part, question, count, length):
    """Return the likeliest bytes after the end of a question, one by one, from the whole text each time."""
    text = [*question.encode()][count - length :] or [CODEC.separator]
    for _ in range(count):
        tokens = torch.tensor([text])
        text.append(int(part.eval()(tokens, Batch(tokens)).value[0, -1, : CODEC.vocab_size].argmax()))
        if text[-1] == CODEC.separator:
            break
    return CODEC.decode([token for token in text[-count:] if token != CODEC.separator])


def test_texts_are_the_likeliest_tokens_up_to_a_string_that_ends_them():
    run = make_run(Case("model", use="transformer", config=MODEL), {}, trains=False)
    (part,) = run.stages.values()
    whole = [greedy(part, question, 12, 40) for question in QUESTIONS]
    stops = [text[4:6] for text in whole]
    for until in ([], *([stop] for stop in stops), stops):
        asked = [
            generation_of(question, {"until": until, "max_gen_toks": 12}, CODEC, 40, "")
            for question in QUESTIONS
        ]
        expected = [
            min((text.partition(stop)[0] for stop in until if stop in text), key=len, default=text)
            for text in whole
        ]
        assert list(generate(Writer(run, caches=True), asked, CODEC)) == expected
        assert list(generate(Writer(run, caches=False), asked, CODEC)) == expected


def test_a_text_ends_once_one_of_its_strings_is_there():
    run = make_run(Case("model", use="transformer", config=MODEL), {}, trains=False)
    (part,) = run.stages.values()
    stop = greedy(part, "one two", 12, 40)[4:6]
    asked = generation_of("one two", {"until": stop, "max_gen_toks": 12}, CODEC, 40, "")
    (text,) = Writer(run, caches=True).write_round(
        [asked.prompt], [0], ends=lambda tokens: stop in CODEC.decode(tokens)
    )
    assert stop in CODEC.decode(text.tokens)
    assert stop not in CODEC.decode(text.tokens[:-1])
    assert text.stopped == "end"


def test_with_dynamic_rope_a_score_does_not_depend_on_longer_requests():
    """Padded to the length of a longer one, it had that one's rotation."""
    scaling = {"type": "dynamic", "factor": 4.0, "original_length": 8}
    config = {**MODEL, "positions": "rope", "rope_scaling": scaling}
    case = Case("model", use="transformer", config=config)
    run = make_run(case, {}, trains=False)
    answers = Answers(run, case.registry().build(run.model), lambda: CODEC)
    requests = [Request(tuple(range(3, 3 + length)), 5) for length in (12, 40, 12, 9)]
    alone = [answers.scores([request])[0].log_probability for request in requests]
    assert [score.log_probability for score in answers.scores(requests)] == pytest.approx(alone, abs=1e-9)


def test_a_special_token_ends_a_text_by_its_name_though_no_text_contains_it(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = ["?", "<|im_end|>", *map(str, range(98))]
    model = tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="?")
    file = tokenizers.Tokenizer(model)
    file.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    file.add_special_tokens(["<|im_end|>"])
    file.save(str(tmp_path / "tokenizer.json"))
    codec = make_tokenizer(str(tmp_path / "tokenizer.json"))
    asked = generation_of("7 8", {"until": ["\n", "9", "<|im_end|>"], "max_gen_toks": 12}, codec, 40, "")
    assert asked.prompt.how.ends == {1}

    run = make_run(Case("model", use="transformer", config={**MODEL, "vocab": 100}), {}, trains=False)
    (part,) = run.stages.values()
    with torch.no_grad():
        tokens = torch.tensor([asked.prompt.tokens])
        likeliest = part.eval()(tokens, Batch(tokens)).value[0, -1].argmax()
        head = part.head.weight
        head[[1, int(likeliest)]] = head[[int(likeliest), 1]]
    assert list(generate(Writer(run, caches=True), [asked], codec)) == [""]


@pytest.mark.parametrize("until", ["", [""], ["", "\n"]])
def test_an_empty_string_ends_no_text(until):
    asked = generation_of("x", {"until": until}, CODEC, 400, "")
    assert asked.cut("4, as I said.") == "4, as I said."


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"tokens": 256, "temperature": 0.0, "top_k": 0, "top_p": 1.0}),
        ({"max_new_tokens": 7, "max_tokens": 9, "temperature": 0.7}, {"tokens": 7, "temperature": 0.7}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"temperature": 0.0, "top_p": 1}, {"temperature": 0.0}),
        ({"do_sample": True, "num_beams": 1}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.5, "top_k": 4, "top_p": 0.9},
            {"temperature": 0.5, "top_k": 4, "top_p": 0.9},
        ),
    ],
)
def test_arguments_mean_what_they_mean_to_lm_eval(arguments, expected):
    how = generation_of("x", arguments, CODEC, 400, "").prompt.how
    assert {name: getattr(how, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"temprature": 1}, "generation_kwargs.temprature is not supported (did you mean 'temperature'?)"),
        ({"num_beams": 4}, "generation_kwargs.num_beams = 4: only 1 is supported"),
        (
            {"max_gen_toks": 40},
            "texts of up to 40 tokens (max_gen_toks in its generation_kwargs, 256 if unset), ",
        ),
        ({}, "but the model reads 40 at once, the question included: expected fewer, or a larger --length"),
        ({"max_gen_toks": "many"}, "max_gen_toks = 'many': expected a number from 1"),
        ({"max_gen_toks": 9, "top_p": 2}, "top_p = 2: expected a number from 0 to 1"),
        (
            {"max_gen_toks": 9, "do_sample": True, "temperature": -1},
            "temperature = -1: expected a number from 0",
        ),
    ],
)
def test_what_cannot_be_generated_is_told(arguments, expected):
    with pytest.raises(NanotrainError) as caught:
        generation_of("x", arguments, CODEC, 40, "--task t")
    assert str(caught.value).startswith("--task t: ")
    assert expected in str(caught.value)


@pytest.mark.full  # lm_eval alone takes ten seconds to import
def test_a_task_of_lm_eval_that_generates_has_the_score_of_its_definition(tmp_path, capsys, monkeypatch):
    """exact_match: three answers, of which two are what the model writes."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.txt").write_text("one two three " * 60)
    data = {"use": "text", "paths": [str(tmp_path / "train.txt")], "suffixes": [".txt"]}
    around = {"model": MODEL, "data": data, "batch": {"sequences": 2}}
    engine = make_engine(
        Case("checkpoint", use="simple", overrides=around), {"run": {"steps": 1}}, folder=tmp_path / "run"
    )
    engine.fit()
    (part,) = engine.run.stages.values()
    answers = [greedy(part, question, 6, 40).strip() for question in ("one", "two", "three")]
    answers[1] = "something else"
    rows = [{"q": q, "a": a} for q, a in zip(("one", "two", "three"), answers, strict=True)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "writes.yaml").write_text(
        f"""task: tiny_writing
dataset_path: json
dataset_kwargs:
  data_files:
    test: {tmp_path / "questions.jsonl"}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
generation_kwargs:
  until: []
  max_gen_toks: 6
filter_list:
  - name: stripped
    filter:
      - function: remove_whitespace
      - function: take_first
metric_list:
  - metric: exact_match
"""
    )
    words = [str(tmp_path / "run"), "--task", "tiny_writing", "--tasks-from", str(tmp_path), "--length", "40"]
    code = main(["eval", *words, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    (row,) = json.loads(out)["tasks"]
    assert (row["metric"], row["value"]) == ("exact_match", pytest.approx(2 / 3))
