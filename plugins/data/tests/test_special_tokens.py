"""Conversations with tokenizers that find special tokens by more than their flag, or draw at random."""

import json

from chats import MARKED, tokenizer_folder
from nanotrain_data.codecs import open_codec
from nanotrain_data.conversations import open_conversation_codec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


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
