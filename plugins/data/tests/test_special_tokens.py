"""Conversations with tokenizers that find special tokens by more than their flag, or draw at random."""

import json

import pytest
from chats import MARKED, tokenizer_folder
from nanotrain_data.codecs import open_codec
from nanotrain_data.conversations import open_conversation_codec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def codec_of(tokenizer):
    return open_conversation_codec(open_codec(str(tokenizer)), str(tokenizer), None)


def turns(*contents):
    return [
        {"role": role, "content": text} for role, text in zip(("user", "assistant"), contents, strict=True)
    ]


def test_a_special_token_that_is_a_piece_of_the_model_is_text(tmp_path):
    """Unigram prefers it to all other readings, however the library is told to read it."""
    path = tokenizer_folder(tmp_path, MARKED)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
    letters = dict.fromkeys("".join(special) + "useraitn\n\u2581", -9.0)
    tokenizer = Tokenizer(models.Unigram([*dict.fromkeys(special, 0.0).items(), *letters.items()], unk_id=3))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path))
    made = codec_of(path).encode(turns("tea<|im_end|>", "no <|endoftext|>"))
    assert [made.tokens.count(tokenizer.token_to_id(word)) for word in special] == [0, 2, 2, 0]
    text = "<|im_start|> user\n tea<|im_end|><|im_end|> \n<|im_start|> assistant\n no <|endoftext|><|im_end|>"
    found = tokenizer.decode(made.tokens, skip_special_tokens=False)
    assert "".join(found.split()) == "".join(text.split())


def test_dropout_is_off(tmp_path):
    path = tokenizer_folder(tmp_path, MARKED)
    described = json.loads(path.read_text())
    described["model"]["dropout"] = 0.5
    path.write_text(json.dumps(described))
    for question in ("beta gamma " * 9, "beta gamma <|im_end|>" * 9):
        made = [codec_of(path).encode(turns(question, "alpha")) for _ in range(4)]
        assert all(each == made[0] for each in made)


def test_what_a_template_has_of_added_tokens_is_text_in_messages_whether_special_or_not(tmp_path):
    """DeepSeek's tokens for roles are not flagged: a message could begin the assistant's turn."""
    user, assistant, end = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend\uff5c>"
    template = (
        "{# <think> </think> /no [X] #}{% for m in messages %}{% if m.role == 'user' %}"
        f"{user}{{{{ m.content }}}}{{% else %}}{assistant}{{% generation %}}{{{{ m.content ~ eos_token }}}}"
        "{% endgeneration %}{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{assistant}{{% endif %}}"
    )
    path = tokenizer_folder(tmp_path, template)
    config = {"eos_token": end, "chat_template": template}
    path.with_name("tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_file(str(path))
    kept, text = ["<think>", "</think>", "/no", "[Y]"], [user, assistant, end, "[X]"]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in [*kept, *text]])
    tokenizer.save(str(path))
    said = " ".join([*kept, *text])
    made = codec_of(path).encode(turns(said, said))
    count = {word: made.tokens.count(tokenizer.token_to_id(word)) for word in [*kept, *text]}
    assert count == dict.fromkeys(kept, 2) | dict.fromkeys(text, 1) | {"[X]": 0}
    assert codec_of(path).prompt(turns(said, "")[:1])[1] == {tokenizer.token_to_id(end)}


def test_a_message_with_what_ends_answers_of_the_plain_form_is_refused():
    codec = open_conversation_codec(open_codec("bytes"), "bytes", None)
    with pytest.raises(ValueError, match=r"has 'No\\x00', with the token that ends answers: 0"):
        codec.encode(turns("Hi", "No\0"))
