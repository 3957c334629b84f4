"""Small conversations for tests, a tokenizer with a chat template, and what both mean, written apart."""

import json

import numpy as np
from nanotrain_data.prepare import prepare
from nanotrain_data.request import Request
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
#: Of the kind that most models have today; the assistant's turns are told by what their prompt is.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: The same text, which says itself what the assistant writes: the newline behind a turn is not of it.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS = ["naïve", "日本", "🙂", "alpha", "beta gamma", "x" * 9, "1 + 1 = 2", "\n\n"]


def chats(count, seed=0):
    """Return ``count`` conversations of one to three turns; each begins with a number of its own."""
    random, found = np.random.default_rng(seed), []
    for number in range(count):
        messages = [{"role": "system", "content": "Be short."}] if number % 3 == 0 else []
        for turn in range(int(random.integers(1, 4))):
            said = [" ".join(random.choice(WORDS, int(random.integers(1, 5)))) for _ in range(2)]
            messages.append({"role": "user", "content": f"{number}.{turn} {said[0]}"})
            messages.append({"role": "assistant", "content": said[1]})
        found.append(messages)
    return found


def write_chats(path, conversations):
    lines = (json.dumps({"id": n, "messages": each}) for n, each in enumerate(conversations))
    path.write_text("".join(line + "\n" for line in lines))
    return path


def prepared_chats(folder, source, *, tokenizer="bytes", workers=1, **options):
    """Prepare a folder of conversations, and return what was done."""
    options = {"field": "messages", "chat": True, **options}
    request = Request(sources=(str(source),), tokenizer=str(tokenizer), out=folder, **options)
    return prepare(request, workers)


def plain(messages):
    """Return the bytes of the plain form, and of each whether it is learned."""
    tokens, learned = b"", []
    for number, message in enumerate(messages):
        heading = ("\n\n" if number else "") + f"### {message['role'].title()}\n"
        content = message["content"].encode()
        assistant = message["role"] == "assistant"
        tokens += heading.encode() + content + (b"\0" if assistant else b"")
        learned += [False] * len(heading.encode()) + [assistant] * (len(content) + assistant)
    return list(tokens), learned


def tokenizer_folder(folder, template=CHATML):
    """Write what a model of the Hub has of its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator((m["content"] for each in chats(50) for m in each), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>", "special": True}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"
