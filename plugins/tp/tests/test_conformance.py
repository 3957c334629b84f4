"""tp keeps the promises of a parallel wrapper, alone and, among all cases, under data parallelism."""

from itertools import product

import pytest

from nanotrain_core.testing import Case, conformance

GPT = {
    "positions": "learned",
    "max_length": 16,
    "norm": "layernorm",
    "activation": "gelu",
    "bias": True,
    "tied": True,
}
LLAMA = {"width": 32, "heads": 8, "kv_heads": 4, "ffn": 88}
ONE_KEY_HEAD = {**LLAMA, "kv_heads": 1, "vocab": 67}
WHOLE = {"sequence_parallel": False}


def case(name, model, topology, config=None, **overrides):
    """Case of one model and layout, with gradients summed by the harness."""
    around = {"parallel": [{"use": "tp"}, {"use": "summed"}], "model": model, **overrides}
    return Case("parallel", use="tp", config=config or {}, topology=topology, overrides=around, name=name)


test_conformance = conformance(
    case("gpt-tp2", GPT, {"tp": 2}, batch={"length": 15}),  # learned positions, and shares of 7 and 8 tokens
    # The first tier has them of ddp and zero12.
    slow=pytest.mark.full,
)

LAYOUTS = {"tp2": {"tp": 2}, "tp4": {"tp": 4}, "dp2-tp2": {"dp": 2, "tp": 2}}
MODELS = {
    "gpt": GPT,
    "llama": LLAMA,
    "one-key-head": ONE_KEY_HEAD,
    "llama-tied": {**LLAMA, "tied": True, "layers": 1},
}
AROUND_TP = {"parallel": [{"use": "tp"}, {"use": "summed"}], "model": GPT}

test_exhaustively = pytest.mark.full(
    conformance(
        # Without sequence parallelism every gradient is complete: nothing need be summed.
        Case("parallel", use="tp", config=WHOLE, topology={"tp": 2}, overrides={"model": GPT}, name="whole"),
        *(
            case(f"{model}-{layout}{suffix}", MODELS[model], LAYOUTS[layout], config)
            for model, layout, (suffix, config) in product(MODELS, LAYOUTS, (("", {}), ("-whole", WHOLE)))
        ),
        # Beside data parallelism: the composition matrix has tp with each gradient sync in the first tier.
        case("one-key-head-dp2-tp2-again", ONE_KEY_HEAD, {"dp": 2, "tp": 2}, {"gather_again": True}),
        case("one-key-head-tp2-again", ONE_KEY_HEAD, {"tp": 2}, {"gather_again": True}),
        case("llama-tp2-again", LLAMA, {"tp": 2}, {"gather_again": True}),
        Case("optimizer", use="adamw", topology={"tp": 2}, overrides=AROUND_TP),
        Case("checkpoint", use="simple", topology={"tp": 2}, overrides=AROUND_TP),
        *(Case("precision", use=use, topology={"tp": 2}, overrides=AROUND_TP) for use in ("bf16", "fp16")),
    )
)
