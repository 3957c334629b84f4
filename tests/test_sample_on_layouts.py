"""Texts are the same on every layout: cached logits of each equal one process that reads the whole text."""

import pytest
import torch
from nanotrain_deepseek.samples import V2, V3
from nanotrain_moe_transformer.samples import QWEN3
from nanotrain_sample.generate import How, Prompt, Writer
from nanotrain_sample.layout import wrappers

from nanotrain_core.batch import Batch
from nanotrain_core.models.cache import Cache
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_run

GPT2 = {
    **{"use": "transformer", "layers": 2, "width": 24, "heads": 4, "vocab": 33, "init_std": 0.3},
    **{"positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True, "max_length": 32},
}
LLAMA = {
    **{
        "use": "transformer",
        "layers": 2,
        "width": 24,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 33,
        "init_std": 0.3,
    },
    "rope_scaling": {"type": "yarn", "original_length": 8},
}
DEEPSEEK_V3, DEEPSEEK_V2 = ({"use": "deepseek", **table, "init_std": 0.3} for table in (V3, V2))
MOE = {"use": "moe_transformer", **QWEN3, "init_std": 0.3}

PIPELINE = {"pp": 2, "tp": 2}
CASES = {
    "gpt2-pp2-tp2": (GPT2, PIPELINE),
    "llama-pp2-tp2": (LLAMA, PIPELINE),
    "v3-pp2-tp2-ep2": (DEEPSEEK_V3, PIPELINE | {"ep": 2}),
    "v2-dp2-ep2": (DEEPSEEK_V2, {"dp": 2, "ep": 2}),
}
#: All layouts, with whole sequences between split layers too.
OTHERS = {
    "llama-tp2": (LLAMA, {"tp": 2}),
    "llama-window-pp2-tp2": (LLAMA | {"window": 3}, PIPELINE),
    "llama-tp4": (LLAMA, {"tp": 4}),  # two ranks have each key and value head
    "llama-dp2-tp2": (LLAMA, {"dp": 2, "tp": 2}),
    "v3-tp2": (DEEPSEEK_V3, {"tp": 2}),
    "v3-dp2-pp2-ep2": (DEEPSEEK_V3, {"dp": 2, "pp": 2, "ep": 2}),
    "v2-tp4-etp2": (DEEPSEEK_V2, {"tp": 4, "etp": 2}),
    "moe-pp2-tp2-ep2": (MOE, PIPELINE | {"ep": 2}),
}
HOW = How(tokens=9, temperature=0.9, top_p=0.95, seed=5, vocab=31)
PROMPTS = [Prompt(tokens, HOW) for tokens in ((3, 1, 4, 1, 5, 9, 2), (6, 5), (3, 5, 8))]


def case_of(model, degrees, *, whole=False):
    wrappers = [{"use": "tp", "sequence_parallel": not whole}] if "tp" in degrees else []
    wrappers += [{"use": "ep_deepseek"}] if degrees.keys() & {"ep", "etp"} else []
    around = {
        "parallel": wrappers,
        "schedule": {"use": "1f1b" if "pp" in degrees else "accumulate"},
        "data": {"vocab": 33},
    }
    return Case("model", use=model["use"], config=model, topology=degrees, overrides=around)


def written(case, *, caches):
    """Return this rank's texts, and logits of the first prompt in passes of 4, 2 and 1 tokens, or None."""
    run = make_run(case, {}, trains=False)
    writer = Writer(run, caches=caches)
    passes = max(prompt.passes(caches=caches) for prompt in PROMPTS)
    numbers = range(writer.replica.index, len(PROMPTS) + writer.replica.index, writer.replica.count)
    texts = [writer.write(PROMPTS[n % len(PROMPTS)], n % len(PROMPTS), passes) for n in numbers]
    tokens, cache, found = torch.tensor([PROMPTS[0].tokens]), Cache(7), []
    for count in (4, 2, 1) if caches else (7,):
        new = tokens[:, cache.start : cache.start + count]
        outputs = writer.executor.through(Batch(new, cache=cache if caches else None))
        cache.advance(count)
        found += [outputs[writer.final].value] if writer.final in outputs else []
    return {text.number: text.tokens for text in texts}, torch.cat(found, dim=1) if found else None


def assert_writes_as_one_process(case):
    ((expected, logits),) = run_ranks(written, 1, case.alone(), caches=False)
    assert all(len(tokens) == 9 and max(tokens) < 31 for tokens in expected.values())
    ranks = run_ranks(written, case.world_size, case, caches=True)
    assert {number for texts, _ in ranks for number in texts} == {0, 1, 2}
    for rank, (texts, _) in enumerate(ranks):
        for number, tokens in texts.items():
            assert tokens == expected[number], f"rank {rank}, text {number}"
    last = [found for _, found in ranks if found is not None]
    assert last
    for found in last:
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-9)


@pytest.mark.full_cases("v3-pp2-tp2-ep2", "v2-dp2-ep2", "gpt2-pp2-tp2")
@pytest.mark.parametrize("name", CASES)
def test_texts_are_those_of_one_process(name):
    assert_writes_as_one_process(case_of(*CASES[name]))


@pytest.mark.full
@pytest.mark.parametrize("whole", [False, True], ids=["sp", "whole"])
@pytest.mark.parametrize("name", {**CASES, **OTHERS})
def test_texts_are_those_of_one_process_everywhere(name, whole):
    assert_writes_as_one_process(case_of(*{**CASES, **OTHERS}[name], whole=whole))


@pytest.mark.parametrize(
    ("run", "adding", "expected"),
    [
        (["lora"], (0,), ["tp", "lora"]),
        (["tp", "lora", "ddp"], (1,), ["tp", "lora"]),
        (["cp", "lora"], (1,), ["cp", "tp", "lora"]),
        (["ddp"], (), ["tp"]),
    ],
)
def test_adapters_of_a_run_come_after_what_splits_their_layers(run, adding, expected):
    saved, degrees = [{"use": use} for use in run], {"tp": 2, "cp": 2 if "cp" in run else 1}
    assert [each["use"] for each in wrappers(saved, degrees, load_plugins(), adding)] == expected
