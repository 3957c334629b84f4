"""What a tokenizer puts before a text, such as BOS, against transformers: of weights alone, and chat runs."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from nanotrain_sample.evaluate.generation import empty_context, generation_of, special_token
from nanotrain_sample.evaluate.scorer import Score
from nanotrain_sample.source import Source, find, prefix_of

from nanotrain_core.api import DataError, load_plugins
from nanotrain_core.api.text import make_tokenizer
from nanotrain_core.cli import main

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

WORDS = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"w{number}": number for number in range(3, 64)}}
TEXT = "w3 w14 w15 w9"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return a folder with a small random Llama whose tokenizer adds BOS, the model, and the tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    file = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    file.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    file.add_special_tokens(["<s>", "</s>", "<unk>"])
    file.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    file.save(str(folder / "tokenizer.json"))
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    torch.manual_seed(5)
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    config = transformers.LlamaConfig(**sizes, **ends, num_hidden_layers=2, initializer_range=0.5)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=file, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    return folder, model, theirs


def call(capsys, *words):
    code = main([*map(str, words), "--set", "run.device=cpu", "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)["texts"]


def test_a_prompt_is_continued_as_transformers_does(llama, capsys):
    folder, model, theirs = llama
    prompt = theirs(TEXT, return_tensors="pt").input_ids
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :].tolist()
    words = ("sample", folder, "--tokens", 8, "--temperature", 0, "--prompt")
    (text,) = call(capsys, *words, TEXT)
    assert text["tokens"] == expected
    assert (text["prompt"], text["prompt_tokens"]) == (TEXT, 5)
    (written,) = call(capsys, *words, f"<s>{TEXT}", "--special-tokens")
    assert (written["tokens"], written["prompt_tokens"]) == (expected, 5)


def test_a_text_ends_with_the_token_that_the_folder_names(llama, tmp_path, capsys):
    """With ``eos_token_id`` of generation_config.json, else of config.json, as transformers does."""
    folder, model, theirs = llama
    prompt = theirs(TEXT, return_tensors="pt").input_ids
    whole = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
    first, second = whole[1].item(), whole[4].item()
    copy = shutil.copytree(folder, tmp_path / "copy")
    words = ("sample", copy, "--tokens", 8, "--temperature", 0, "--prompt", TEXT)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "eos_token_id": [second]}))
    generation = copy / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": first}))
    (text,) = call(capsys, *words)
    assert text["tokens"] == whole[:2].tolist()
    generation.unlink()
    (text,) = call(capsys, *words)
    assert text["tokens"] == whole[:5].tolist()
    generation.write_text('{"eos_token_id": "</s>"}')
    assert main([*map(str, words)]) == 2
    assert "eos_token_id is '</s>'; expected a token's number, or a list of them" in capsys.readouterr().err


@torch.no_grad()
def test_a_file_is_scored_after_it(llama, tmp_path, capsys):
    folder, model, theirs = llama
    (tmp_path / "text.txt").write_text(TEXT)
    tokens = theirs(TEXT, return_tensors="pt").input_ids
    expected = F.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:]).item()
    (text,) = call(capsys, "eval", folder, "--text", tmp_path / "text.txt", "--length", 16)
    assert text["tokens"] == 4
    assert text["loss"] == pytest.approx(expected, rel=1e-5)


def test_what_a_task_generates_follows_it(llama):
    folder, _, theirs = llama
    codec = make_tokenizer(str(folder / "tokenizer.json"))
    for context in (TEXT, ""):
        asked = generation_of(context, {"max_gen_toks": 4}, codec, 16, "", codec.prefix)
        assert [*asked.prompt.tokens] == theirs(context).input_ids
    asked = generation_of(TEXT, {"max_gen_toks": 4}, codec, 16, "", codec.prefix, {7})
    assert asked.prompt.how.ends == {1, 7}


def test_an_empty_context_is_the_named_bos_that_stands_before_no_text(llama, tmp_path):
    """As in lm_eval, for folders such as DeepSeek's: a BOS in tokenizer_config.json, no post-processor."""
    folder = shutil.copytree(llama[0], tmp_path / "copy")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    codec = make_tokenizer(str(folder / "tokenizer.json"))
    for name, expected in (
        ("</s>", 1),
        ({"content": "<s>"}, 0),
        ("w7", codec.separator),
        (None, codec.separator),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": name}))
        bos = find(folder, None, None, load_plugins()).bos
        number = special_token(codec, bos) if bos else None
        assert empty_context(codec, (), number) == expected
        asked = generation_of("", {"max_gen_toks": 4}, codec, 16, "", bos=number)
        assert [*asked.prompt.tokens] == [expected]


def of_data(data):
    """Return a recipe with that data component, as it is resolved."""
    registry = SimpleNamespace(build=lambda selection: data)
    return SimpleNamespace(registry=registry, recipe=SimpleNamespace(data=None))


def test_a_run_of_text_has_none(llama):
    folder, _, _ = llama
    codec, text = make_tokenizer(str(folder / "tokenizer.json")), of_data(object())
    assert prefix_of(Source(folder, {"model": {}}, None), codec, text) == (0,)
    assert prefix_of(Source(folder, {"model": {}, "data": {}}, None), codec, text) == ()
    assert prefix_of(Source(folder, {"model": {}}, None), make_tokenizer("bytes"), text) == ()


def test_a_run_of_conversations_has_it_if_they_begin_with_it(llama):
    folder, _, _ = llama
    codec = make_tokenizer(str(folder / "tokenizer.json"))

    def gone(messages):
        raise DataError("no folder")

    for prompt, expected in (
        (lambda messages: ([0, 7, 5], frozenset({1})), (0,)),
        (lambda messages: ([7, 0], frozenset()), ()),
        (lambda messages: ([], frozenset()), ()),
        (gone, ()),
    ):
        found = of_data(SimpleNamespace(answer_prompt=prompt))
        assert prefix_of(Source(folder, {"model": {}, "data": {}}, None), codec, found) == expected


@pytest.mark.full  # lm_eval alone takes ten seconds to import
def test_a_task_is_asked_as_lm_eval_asks_transformers(llama):
    """After BOS, which is also what stands for an empty context, and is not scored."""
    pytest.importorskip("lm_eval")
    from nanotrain_sample.evaluate.tasks import adapter

    folder, _, theirs = llama
    codec = make_tokenizer(str(folder / "tokenizer.json"))
    asked = []

    def scores(requests):
        asked.extend((request.tokens, request.scored) for request in requests)
        return [Score(0.0, greedy=True) for _ in requests]

    model = adapter(codec, SimpleNamespace(scores=scores), 16, codec.prefix)
    assert model.prefix_token_id == theirs.bos_token_id
    model.loglikelihood([SimpleNamespace(args=pair) for pair in (("w3 w14", " w15 w9"), ("", TEXT))])
    model.loglikelihood_rolling([SimpleNamespace(args=(TEXT,))])
    tokens = tuple(theirs(TEXT).input_ids)
    assert asked == [(tokens, 2), (tokens, 4), (tokens, 4)]
