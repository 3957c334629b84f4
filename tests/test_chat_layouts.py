"""Conversations train on every layout as in one process, to 1e-9 in float64.

The loss is divided by the tokens of answers on all ranks, of which ranks have different numbers.
"""

import json
import random

import pytest
import torch
from as_one_process import assert_trains_as_one_process
from nanotrain_data.chat import Chat
from nanotrain_data.config import ChatConfig
from nanotrain_data.prepare import prepare
from nanotrain_data.request import Request
from test_document_masks import DEEPSEEK, LLAMA

from nanotrain_core.batch import IGNORE, Batch, Shard
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_run

LENGTH = 48
MTP = {**DEEPSEEK, "mtp": 1}
TP, EP, PP = {"use": "tp", "sequence_parallel": True}, {"use": "ep_deepseek"}, {"schedule": {"use": "1f1b"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Answers of 1 to 20 tokens: ranks differ in what they learn."""
    root, draw = tmp_path_factory.mktemp("chats"), random.Random(0)
    with (root / "in.jsonl").open("w") as file:
        for number in range(200):
            said = "".join(draw.choices("abcdefgh ", k=draw.randrange(20)))
            asked = [{"role": "user", "content": str(number)}] if number % 2 else []
            messages = [*asked, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": messages}) + "\n")
    sources = (str(root / "in.jsonl"),)
    out = root / "prepared"
    prepare(Request(sources=sources, tokenizer="bytes", out=out, field="messages", chat=True), workers=1)
    return out


def case_of(folder, model, topology, wrappers, packed=True, **overrides):
    data = {"use": "chat", "paths": [str(folder)], "packed": packed}
    batch = {"sequences": 8, "microbatch": 1, "length": LENGTH}
    parallel = [*wrappers, *([{"use": "ddp"}] if wrappers or topology else [])]
    overrides = {"parallel": parallel, "data": data, "batch": batch, **overrides}
    options = {key: value for key, value in model.items() if key != "use"}
    return Case("model", use=model["use"], config=options, topology=topology, overrides=overrides)


def test_ranks_that_have_different_numbers_of_answers_train_as_one_process(folder):
    data = Chat(ChatConfig(paths=(str(folder),), packed=False))
    data.open(length=LENGTH, seed=7)
    counts = (data.train_batch(8, Shard()).targets != IGNORE).sum(1)
    assert counts[:4].sum() != counts[4:].sum()
    assert_trains_as_one_process(case_of(folder, LLAMA, {"dp": 2}, [], packed=False))


@pytest.mark.full
@pytest.mark.parametrize("packed", [True, False])
def test_pipeline_tensor_and_data_parallel_ranks_train_as_one_process(folder, packed):
    topology = {"pp": 2, "tp": 2, "dp": 2}
    assert_trains_as_one_process(case_of(folder, LLAMA, topology, [TP], packed, **PP))


@pytest.mark.full
@pytest.mark.parametrize("topology", [{"dp": 2, "ep": 2}, {"pp": 2, "tp": 2}], ids=["ep", "pp-tp"])
def test_experts_and_multi_token_prediction_train_as_one_process(folder, topology):
    more = PP if "pp" in topology else {}
    wrappers = [EP] if "ep" in topology else [TP]
    assert_trains_as_one_process(case_of(folder, MTP, topology, wrappers, **more))


def test_packed_and_padded_conversations_train_as_each_by_itself(folder):
    """The definition: the cross-entropy of the answers' tokens, each conversation read alone."""
    part = make_run(case_of(folder, LLAMA, {}, []).alone(), {}).stages[0]
    gradients, losses = [], []
    for packed in (True, False, None):
        data = Chat(ChatConfig(paths=(str(folder),), packed=bool(packed), validation_fraction=0.0))
        data.open(length=LENGTH, seed=7)
        batch = data.train_batch(data.train, Shard())
        batches = [batch]
        if packed is None:  # each row cut behind its last target: no padding, no mask
            ends = (batch.targets != IGNORE).int().cumsum(1).argmax(1) + 1
            batches = [
                Batch(batch.tokens[n : n + 1, :e], batch.targets[n : n + 1, :e]) for n, e in enumerate(ends)
            ]
        part.zero_grad()
        loss = sum(part(each.tokens, each).losses["lm"] for each in batches)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in part.named_parameters()})
    assert losses[:2] == pytest.approx(losses[2:] * 2, rel=1e-12)
    for found in gradients[:2]:
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[2][name], atol=1e-9, rtol=0, msg=name)
