"""``nanotrain sample --chat``: a run on conversations answers, and its answer ends with its turn."""

import json

import pytest
import torch
from command import nanotrain

from nanotrain_core.cli import main
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


TEMPLATE = (
    "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s>{% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)


@pytest.mark.parametrize(
    "file", ["chat_template.jinja", pytest.param("tokenizer_config.json", marks=pytest.mark.full)]
)
def test_a_folder_of_transformers_is_asked_with_the_template_beside_its_tokenizer(tmp_path, capsys, file):
    """It was refused: no template is known. The tokens are those of transformers' own rendering."""
    pytest.importorskip("nanotrain_data")
    transformers, tokenizers = (pytest.importorskip(name) for name in ("transformers", "tokenizers"))
    theirs = pytest.importorskip("hf_models").llama()
    theirs.save_pretrained(tmp_path)
    words = [
        "<s>",
        "</s>",
        "system",
        "user",
        "assistant",
        *(f"w{n}" for n in range(theirs.config.vocab_size - 5)),
    ]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    asked = ["sample", str(tmp_path), "--chat", "--prompt", "w3 w4", "--system", "w9", "--tokens", "3"]
    asked += ["--temperature", "0", "--json", "--set", "run.device=cpu"]
    assert main(asked) == Exit.USER
    assert "there is no chat template next to" in capsys.readouterr().err
    jinja = file.endswith(".jinja")
    (tmp_path / file).write_text(TEMPLATE if jinja else json.dumps({"chat_template": TEMPLATE}))
    assert main(asked) == Exit.DONE
    (text,) = json.loads(capsys.readouterr().out)["texts"]
    messages = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w3 w4"}]
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
    prompt = fast.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    prompt = prompt if isinstance(prompt, torch.Tensor) else prompt["input_ids"]
    assert text["prompt"].split() == fast.decode(prompt[0], skip_special_tokens=True).split()
    expected = theirs.generate(prompt, max_new_tokens=3, do_sample=False, eos_token_id=[1])
    assert text["tokens"] == expected[0, prompt.shape[1] :].tolist()


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
