"""``nanotrain sample --chat``: a run on conversations answers, and its answer ends with its turn."""

import json

import pytest
from command import nanotrain

from nanotrain_core.errors import Exit

RECIPE = """
[run]
name = "chat"
steps = 60
device = "cpu"
[batch]
sequences = 4
microbatch = 4
length = 64
[evaluation]
sequences = 0
[model]
use = "transformer"
layers = 2
width = 64
heads = 4
vocab = 256
max_length = 128
[optimizer]
use = "adamw"
lr = 1e-2
[checkpoint]
use = "simple"
[data]
use = "chat"
paths = ["prepared"]
validation_fraction = 0.0
packed = false
"""
CHATS = [("2 + 2?", "It is 4."), ("Hi", "Hello!"), ("Bye", "Bye."), ("Who?", "A model.")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    messages = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in CHATS]
    lines = (json.dumps({"messages": each}) + "\n" for each in messages)
    (folder / "chats.jsonl").write_text("".join(lines))
    (folder / "chat.toml").write_text(RECIPE)
    for words in (
        ("data", "prepare", "chats.jsonl", "--chat", "--tokenizer", "bytes", "--out", "prepared"),
        ("run", "chat.toml", "--nproc", "1"),
    ):
        done = nanotrain(*words, cwd=folder)
        assert done.code == Exit.DONE, done.err
    return folder


@pytest.mark.full
@pytest.mark.parametrize("layout", [(), ("--degree", "tp=2")], ids=["one process", "tp 2"])
def test_a_run_on_conversations_answers_and_stops(place, layout):
    words = [word for question, _ in CHATS for word in ("--prompt", question)]
    greedy = ("--temperature", "0", "--tokens", "40", "--json")
    done = nanotrain("sample", "runs/chat", "--chat", *words, *greedy, *layout, cwd=place)
    assert done.code == Exit.DONE, done.err
    for (question, answer), text in zip(CHATS, json.loads(done.out)["texts"], strict=True):
        assert text["prompt"] == f"### User\n{question}\n\n### Assistant\n"
        assert (text["text"], text["stopped"]) == (answer, "end")
        assert text["tokens"] == [*answer.encode(), 0]


@pytest.mark.full
def test_the_system_speaks_first(place):
    words = ("--chat", "--system", "Be brief.", "--prompt", "Hi", "--tokens", "1", "--json")
    done = nanotrain("sample", "runs/chat", *words, cwd=place)
    (text,) = json.loads(done.out)["texts"]
    assert text["prompt"] == "### System\nBe brief.\n\n### User\nHi\n\n### Assistant\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--chat",), "--chat: expected --prompt TEXT"),
        (("--chat", "--prompt", "Hi", "--special-tokens"), "--special-tokens: the chat template writes them"),
        (("--system", "Be brief."), "--system is of a conversation: expected --chat beside it"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, words, expected):
    done = nanotrain("sample", "runs/none", *words, cwd=tmp_path)
    assert done.code == Exit.USER
    assert expected in done.err
