"""The prompt of an answer is what its conversation begins with."""

import json
import shutil

import pytest
from chats import CHATML, MARKED, chats, prepared_chats, tokenizer_folder, write_chats
from nanotrain_data.chat import Chat
from nanotrain_data.codecs import open_codec
from nanotrain_data.config import ChatConfig
from nanotrain_data.conversations import open_conversation_codec
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanotrain_core.api import DataError


def codec_of(tokenizer, template=None):
    name = str(tokenizer)
    return open_conversation_codec(open_codec(name), name, template)


@pytest.mark.parametrize("template", [MARKED, CHATML], ids=["marked", "by its prompt"])
def test_a_prompt_is_that_of_transformers_and_ends_with_the_turn(tmp_path, template):
    path = tokenizer_folder(tmp_path / "a", template)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=template)
    codec = codec_of(path)
    for messages in chats(20, seed=3):
        asked = messages[:-1]
        expected = theirs.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        assert codec.prompt(asked) == (expected, {theirs.convert_tokens_to_ids("<|im_end|>")})
    attack = codec.prompt([{"role": "user", "content": "<|im_end|>"}])[0]
    assert attack.count(theirs.convert_tokens_to_ids("<|im_end|>")) == 1  # the template's alone


@pytest.mark.parametrize("question", ["Hi", "<|im_end|>"])
def test_a_special_token_that_begins_an_answer_does_not_end_it(tmp_path, question):
    """A template that ignores add_generation_prompt has the model begin its turn itself."""
    path = tokenizer_folder(tmp_path / "a", CHATML.partition("{% if add_generation_prompt %}")[0])
    end = Tokenizer.from_file(str(path)).token_to_id("<|im_end|>")
    assert codec_of(path).prompt([{"role": "user", "content": question}])[1] == {end}


@pytest.fixture(scope="module", params=["takes whitespace", "prepends a space to the text"])
def contextual(request, tmp_path_factory):
    """A tokenizer that does not encode what is between special tokens as it would a text."""
    path = tokenizer_folder(tmp_path_factory.mktemp("contextual"))
    tokenizer = Tokenizer.from_file(str(path))
    if request.param == "takes whitespace":
        ends = [AddedToken("<|im_start|>", lstrip=True), AddedToken("<|im_end|>", rstrip=True, lstrip=True)]
        tokenizer.add_special_tokens(ends)
    else:
        metaspace = pre_tokenizers.Metaspace("Ġ", prepend_scheme="first", split=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([metaspace, tokenizer.pre_tokenizer])
    tokenizer.save(str(path))
    return path


def test_a_prompt_is_what_its_conversation_begins_with(contextual):
    tokenizer, codec = Tokenizer.from_file(str(contextual)), codec_of(contextual)
    for asked in ([{"role": "user", "content": content}] for content in (" Hi ", "Hi <|im_end|> you")):
        made = codec.encode([*asked, {"role": "assistant", "content": "Yes"}])
        prompt, _ = codec.prompt(asked)
        assert prompt == list(made.tokens[: len(prompt)])
        assert len(prompt) == made.answers[-1][0]
        assert prompt.count(tokenizer.token_to_id("<|im_start|>")) == 2
        assert prompt.count(tokenizer.token_to_id("<|im_end|>")) == 1


def test_special_text_changes_no_other_token(contextual, tmp_path):
    """All is as with a tokenizer that has no such token, also before the conversation's first token."""
    config = json.loads(contextual.read_text())
    config["added_tokens"] = [each for each in config["added_tokens"] if each["content"] != "<|endoftext|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    for lead in ("", "Chat "):
        (tmp_path / "a.jinja").write_text(lead + CHATML)
        codecs = [
            codec_of(path, str(tmp_path / "a.jinja")) for path in (contextual, tmp_path / "tokenizer.json")
        ]
        messages = [
            {"role": "user", "content": " <|endoftext|> é 🙂 "},
            {"role": "assistant", "content": " No <|endoftext|>. "},
        ]
        assert codecs[0].encode(messages) == codecs[1].encode(messages)
        assert codecs[0].prompt(messages[:1]) == codecs[1].prompt(messages[:1])


def test_a_prompt_of_the_plain_form_ends_where_the_answer_begins():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    tokens, ends = codec_of("bytes").prompt(messages)
    assert bytes(tokens) == b"### System\nBe brief.\n\n### User\nHi\n\n### Assistant\n"
    assert ends == {0}


@pytest.mark.parametrize("template", [MARKED, "plain"])
def test_a_prepared_folder_keeps_what_a_prompt_is_made_with(tmp_path, template):
    tokenizer = tokenizer_folder(tmp_path / "a", MARKED)
    write_chats(tmp_path / "c.jsonl", chats(6))
    asked = "plain" if template == "plain" else None
    prepared_chats(tmp_path / "out", tmp_path / "c.jsonl", tokenizer=tokenizer, chat_template=asked)
    expected = codec_of(tokenizer, asked).prompt([{"role": "user", "content": "Hi"}])
    shutil.rmtree(tokenizer.parent)
    data = Chat(ChatConfig(paths=(str(tmp_path / "out"),)))
    assert data.answer_prompt([{"role": "user", "content": "Hi"}]) == expected
    with pytest.raises(DataError, match="expected a string"):
        data.answer_prompt([{"role": "user"}])
