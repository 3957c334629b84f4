"""What docs/weights.md does with a model of Hugging Face, done with a small one."""

import json
import random
import shlex

import pytest
import torch
import torch.nn.functional as F
from command import nanotrain
from doc_blocks import ROOT, blocks, commands
from hf_models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanotrain_core.errors import Exit

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NAME = "SmolLM2-1.7B-Instruct"
#: What makes the page's recipe small, and its first step comparable: each batch has all conversations, a
#: sequence for each.
SMALL = (
    "run.steps=25",
    "run.device=cpu",
    "batch.sequences=160",
    "batch.microbatch=40",
    "batch.length=64",
    "evaluation.sequences=0",
    "optimizer.lr=0.01",
    "precision.use=fp32",
    "data.packed=false",
    "data.validation_fraction=0.0",
)


def sums():
    draw = random.Random(1)
    for _ in range(160):
        a, b = draw.randrange(5), draw.randrange(5)
        yield [
            {"role": "user", "content": f"{a} + {b}?"},
            {"role": "assistant", "content": f"That is {a + b}."},
        ]


def write_model(folder):
    """Write what the Hub has of a model: weights, tokenizer, template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator((m["content"] for each in sums() for m in each), trainer)
    llama(vocab_size=320, num_key_value_heads=2).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


@torch.no_grad()
def loss_of(folder, tokenizer, conversations):
    """Return transformers' loss on the assistant's tokens, a mean over those of all conversations."""
    model, total, count = AutoModelForCausalLM.from_pretrained(folder).eval(), 0.0, 0
    for messages in conversations:
        found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        tokens, mask = (torch.tensor(found[key]) for key in ("input_ids", "assistant_masks"))
        labels = tokens.masked_fill(mask == 0, -100)[1:]
        total += F.cross_entropy(model(tokens[None]).logits[0, :-1], labels, reduction="sum").item()
        count += int(mask[1:].sum())
    return total / count


@pytest.mark.full
def test_the_page_leads_from_convert_to_sample_on_tp_2_dp_2(tmp_path):
    page = [block for block in blocks() if block.page == ROOT / "docs/weights.md"]
    (at,) = (number for number, block in enumerate(page) if f"convert {NAME}" in block.text)
    write_model(tmp_path / NAME)
    chats = [*sums()]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in chats))
    (tmp_path / "mine.toml").write_text(page[at + 1].text)
    small = [word for setting in SMALL for word in ("--set", setting)]
    greedy = ["--temperature", "0", "--tokens", "8", "--json", "--set", "precision.use=fp32"]
    printed = {}
    changes = {"run": small, "sample": greedy}
    for _, *words in commands(page[at]):
        done = nanotrain(*words, *changes.get(words[0], []), cwd=tmp_path)
        assert done.code == Exit.DONE, f"{shlex.join(words)}: {done.err}"
        printed[words[0]] = done.out
    rows = map(json.loads, (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows if row["event"] == "step"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "llama")  # which convert copied along
    before, after = (loss_of(tmp_path / folder, tokenizer, chats) for folder in (NAME, "exported"))
    assert losses[0] == pytest.approx(before, rel=1e-5)
    assert after < before / 3
    (text,) = json.loads(printed["sample"])["texts"]
    asked = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    read = tokenizer.apply_chat_template([{"role": "user", "content": "2 + 2?"}], **asked)["input_ids"]
    assert text["prompt_tokens"] == read.shape[1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    written = model.generate(read, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, read.shape[1] :]
    assert text["tokens"] == written[: len(text["tokens"])].tolist()
