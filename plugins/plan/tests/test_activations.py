"""Activations tensor by tensor: DeepSeek-V3's and a published account, SwiGLU's and a compiled graph's."""

import json
from collections import Counter

import pytest
import torch
from nanotrain_plan.dry.recorder import Recorder
from nanotrain_plan.hardware import find_hardware
from nanotrain_plan.memory import activations
from nanotrain_plan.plan import make_plan
from torch.autograd.graph import saved_tensors_hooks

from nanotrain_core.api import resolve_recipe
from nanotrain_core.api.torch import SwiGLU
from nanotrain_core.cli import main

MiB = 2**20

#: A layer of DeepSeek-V3 with experts, one sequence of 4096 tokens, BF16, in MiB: 2236 in all. Source:
#: github.com/yanring/Megatron-MoE-ModelZoo, misc/tools/deepseek_mem_estimate.py, whose MB is 2^20 bytes.
GOLDEN = {
    "residual stream": 56 + 56,  # input tensor, attn_bda_out
    "norms": 56 + 56,  # input norm output, shared_AG_out
    "latents": 12 + 12 + 4 + 4,  # q_down_out, q_norm_out, kv_compressed, kv_norm_out
    "q and k": 192 + 192,
    "v": 128,
    "attention": 128 + 2,  # attn_out, attn_ctx_tensor
    "router": 2 + 8,  # router_probs, permute_row_id_map
    "shared expert": 32 + 16,
    "rows": 448 + 448,  # permute_out, unpermute_alltoall_out
    "experts": 256 + 128,
}
#: MiB that may differ. Scores are in float32 here, there is an index for each of 32,768 rows in place of
#: 4096 x 256, and the latent of keys and values is kept with its rotary key beside it.
MARGIN = {name: 6 if name == "router" else 1 for name in GOLDEN}


def group(each):
    """Return which of GOLDEN's a tensor of layer 0 belongs to."""
    module, op = each.module.removeprefix("layers.0").strip("."), each.op.removeprefix("aten::")
    if not module:
        return "residual stream"
    if module in ("attn_norm", "ffn_norm"):
        return "norms"
    if module.startswith("attn."):
        return "latents"
    if module == "attn":
        return {"cat": "q and k", "clone": "v"}.get(op, "attention")
    if module.startswith("moe.shared"):
        return "shared expert"
    if module == "moe.experts" and each.shape[-1:] == (7168,):
        return "rows"
    if module == "moe.experts" and each.dtype == "bfloat16" and each.shape[-1:] == (2048,):
        return "experts"
    return "router"


@pytest.mark.full
def test_activations_of_v3_are_those_of_megatrons_account():
    pytest.importorskip("nanotrain_ep_deepseek")
    pytest.importorskip("nanotrain_zero12")
    overrides = [
        "run.ranks = 64", "topology.pp = 1", 'schedule.use = "accumulate"', "batch.sequences = 64",
        "model.layers = 1", "model.dense_layers = 0", "model.mtp = 0", 'precision.use = "bf16"',
        "phase = []", "run.steps = 10", 'parallel = [{use = "ep_deepseek"}]',
    ]  # fmt: skip
    found = resolve_recipe("deepseek_v3_671b", overrides=overrides)
    recipe = found.recipe
    plan = make_plan(recipe, found.registry, found.layout, find_hardware("h800"))
    kept = [each for each in activations(plan.stages, 0).tensors if each.module.startswith("layers.0")]
    ours: Counter[str] = Counter()
    for each in kept:
        if not each.recomputable:
            ours[group(each)] += each.bytes * each.count
    for name, golden in GOLDEN.items():
        assert ours[name] / MiB == pytest.approx(golden, abs=MARGIN[name]), name
    assert sum(ours.values()) / MiB == pytest.approx(2236, rel=0.01)
    again: Counter[tuple[str, str]] = Counter()
    for each in kept:
        if each.recomputable:
            again[each.module, each.op] += each.bytes * each.count // MiB
    assert again == {
        ("layers.0.moe.experts", "aten::silu"): 128,
        ("layers.0.moe.shared", "aten::silu"): 16,
        ("layers.0.moe.router", "aten::_to_copy"): 112 + 7,
    }


def test_a_compiled_swiglu_keeps_what_is_not_recomputable():
    T, D, F = 64, 16, 48
    x = torch.randn(T, D, dtype=torch.bfloat16)
    with torch.device("meta"):
        eager = SwiGLU(D, F).to(torch.bfloat16)
    recorder = Recorder("meta")
    with recorder:
        recorder.enter("F")
        y = eager(x.to("meta").requires_grad_())
        recorder.enter("end")
    own = [s for s in recorder.phases[-2].kept if s.shape == (T, F)]
    assert sorted(s.op for s in own if s.recomputable) == ["aten::silu"]
    del y
    saved = {}

    def pack(tensor):
        if tensor.shape in ((T, F), (F, T)):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    compiled = torch.compile(
        SwiGLU(D, F).to(torch.bfloat16), backend="aot_eager_decomp_partition", fullgraph=True
    )
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(x.requires_grad_()).sum().backward()
    assert sum(saved.values()) == sum(s.bytes for s in own if not s.recomputable)


@pytest.mark.full
@pytest.mark.parametrize(("precision", "hardware"), [("fp8_deepseek_v3", "h100"), ("mxfp8", "b200")])
def test_selective_recomputation_keeps_products_of_fp8_as_they_are_returned(precision, hardware, capsys):
    """A GPU's kernels write them in the dtype of the inputs, however few bits their operands have."""
    pytest.importorskip("nanotrain_fp8_deepseek_v3")
    wrapper = '[{use = "recompute", granularity = "selective"}]'

    def products(use):
        words = ["--set", f"precision.use={use}", "--set", "model.layers=1", "--set", f"parallel={wrapper}"]
        assert main(["plan", "laptop", "--hardware", hardware, "--json", *words]) == 0
        kept = json.loads(capsys.readouterr().out)["memory"]["activations"]
        gemms = [each for each in kept if each["op"].endswith("mm") and each["module"].startswith("layers")]
        return sorted((each["module"], each["dtype"], each["bytes"] * each["count"]) for each in gemms)

    assert products(precision) == products("bf16") != []
