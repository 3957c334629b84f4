"""Weights in and out of Hugging Face's files: logits are those of its own implementations."""

import json

import attrs
import pytest
import torch
import transformers
from nanotrain_moe_transformer.config import MoETransformerConfig
from nanotrain_moe_transformer.hf_names import names
from nanotrain_moe_transformer.samples import MIXTRAL, QWEN3
from safetensors.torch import load_file

from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.errors import NanotrainError
from nanotrain_core.hf.convert import convert
from nanotrain_core.hf.open_weights import open_weights
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing.converted import logits_at, tensors_at

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
#: Released Mixtral 8x7B and Qwen3-30B-A3B have no more options than these, but for sizes.
CHOICES = {
    "mixtral": (
        transformers.MixtralForCausalLM,
        {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "mixtral-tied": (
        transformers.MixtralForCausalLM,
        {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 3}
        | {"tie_word_embeddings": True, "head_dim": 16, "rope_parameters": None},
    ),
    "qwen2": (
        transformers.Qwen2MoeForCausalLM,
        {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
        | {"shared_expert_intermediate_size": 40, "intermediate_size": 80},
    ),
    "qwen2-mixed": (
        transformers.Qwen2MoeForCausalLM,
        {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "qkv_bias": False}
        | {"shared_expert_intermediate_size": 40, "intermediate_size": 80, "norm_topk_prob": True}
        | {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3": (
        transformers.Qwen3MoeForCausalLM,
        {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 16}
        | {"norm_topk_prob": True, "intermediate_size": 80},
    ),
    "qwen3-mixed": (
        transformers.Qwen3MoeForCausalLM,
        {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "attention_bias": True}
        | {"intermediate_size": 80, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
}
#: Their classes have it in every layer, whatever these files say of layers, as released ones do.
WINDOWS = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 4}
CHOICES |= {
    f"{choice}-window": (CHOICES[choice][0], CHOICES[choice][1] | WINDOWS) for choice in ("mixtral", "qwen3")
}
#: Qwen2-MoE's class has it in every second layer of the first ones, unless the file says in which.
CHOICES["qwen2-window"] = CHOICES["qwen2"][0], CHOICES["qwen2"][1] | WINDOWS | {"max_window_layers": 3}
CHOICES["qwen2-plain-window"] = (
    CHOICES["qwen2"][0],
    CHOICES["qwen2-mixed"][1] | WINDOWS | {"layer_types": ["sliding_attention"] * 4},
)


def theirs(choice, folder):
    """Save a random model in ``folder`` and return it."""
    model_class, options = CHOICES[choice]
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**SIZES, **rope, **options})).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                tensor.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def tokens():
    return torch.randint(SIZES["vocab_size"], (3, 40), generator=torch.Generator().manual_seed(1))


def our_logits(path):
    return logits_at(path, tokens())


@torch.no_grad()
def logits(model):
    return model(tokens()).logits


@pytest.mark.parametrize("choice", CHOICES)
def test_logits_are_those_of_transformers_there_and_back(choice, tmp_path):
    model = theirs(choice, tmp_path / "theirs")
    expected = logits(model)
    assert expected.std() > 0.5
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    convert(tmp_path / "ours", tmp_path / "exported", load_plugins(), shard_bytes=40_000)
    convert(tmp_path / "exported", tmp_path / "again", load_plugins())
    for path in ("theirs", "ours"):
        assert (our_logits(tmp_path / path) - expected).abs().max() < 1e-4
    exported, loaded = type(model).from_pretrained(
        tmp_path / "exported", attn_implementation="eager", output_loading_info=True
    )
    assert not any(loaded.values()), loaded
    assert torch.equal(logits(exported), expected)
    for name in ("model.safetensors", "model.toml"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_logits_of_a_model_whose_routers_count_the_whole_batch_are_the_same(tmp_path):
    """Their loads are buffers, which no file has, and only the auxiliary loss reads."""
    expected = logits(theirs("qwen3", tmp_path / "theirs"))
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    path = tmp_path / "ours" / "model.toml"
    counting = 'load_balancing_type = "global_aux_loss"\naux_loss_coeff = 0.1\n'
    lines = [line for line in path.read_text().splitlines() if line.split(" ")[0] not in counting]
    path.write_text("\n".join([*lines, counting]))
    model = load_plugins().build(open_weights(tmp_path / "ours", load_plugins()).selection)
    assert [*model.build(Part.whole(4)).buffers()]
    assert (our_logits(tmp_path / "ours") - expected).abs().max() < 1e-4


@pytest.mark.parametrize("choice", ["mixtral", "qwen2", "qwen3"])
def test_an_export_has_the_tensors_of_the_released_files(choice, tmp_path):
    theirs(choice, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    convert(tmp_path / "ours", tmp_path / "exported", load_plugins())
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("theirs", "exported"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    expert = {"mixtral": "block_sparse_moe.experts.5.w2.weight", "qwen3": "mlp.experts.5.down_proj.weight"}
    expert["qwen2"] = "mlp.shared_expert_gate.weight"
    assert f"model.layers.3.{expert[choice]}" in after


def test_a_file_that_says_which_layers_have_a_window_is_read_as_transformers_reads_it(tmp_path):
    for choice in ("mixtral-window", "qwen3-window"):
        theirs(choice, tmp_path / choice)
        path = tmp_path / choice / "config.json"
        kinds = ["full_attention", "sliding_attention"] * 2
        path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_types": kinds}))
        model = CHOICES[choice][0].from_pretrained(tmp_path / choice, attn_implementation="eager")
        assert (our_logits(tmp_path / choice) - logits(model)).abs().max() < 1e-4


@pytest.mark.parametrize("choice", ["mixtral", "qwen2", "qwen3"])
def test_options_that_are_left_out_mean_what_they_mean_to_transformers(choice, tmp_path):
    """Released files have them; a file written by hand, or by another version, may not."""
    model_class, _ = CHOICES[choice]
    config = model_class.config_class()
    needed = {"hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32, "vocab_size": 96}
    needed |= {"intermediate_size": 64, "num_experts_per_tok": config.num_experts_per_tok}
    experts = {"num_experts": 8, "moe_intermediate_size": 32}
    needed |= {"num_local_experts": 8} if choice == "mixtral" else experts
    table = names.table({"model_type": config.model_type, **needed}, ())
    found = MoETransformerConfig(**table | {"mlp_only_layers": ()}).resolved()
    theirs = model_class.config_class(**needed)
    head_size = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert found.kv_heads == theirs.num_key_value_heads
    assert found.head_size == head_size
    assert found.norm_eps == theirs.rms_norm_eps
    assert found.rope_theta == theirs.rope_parameters["rope_theta"]
    assert found.normalize_weights == getattr(theirs, "norm_topk_prob", True)
    assert found.moe_layers == 2
    assert found.shared_expert_ffn == getattr(theirs, "shared_expert_intermediate_size", 0)
    assert bool(found.attention_bias) == getattr(theirs, "qkv_bias", False)


@pytest.mark.parametrize(
    ("choice", "layers"), [("mixtral", 4), ("qwen2", 4), ("qwen3", 4), ("qwen3-mixed", 1)]
)
def test_the_auxiliary_loss_keeps_its_weight_there_and_back(choice, layers):
    """At even load transformers' loss is K, and ours 1 in each layer with experts."""
    model_class, options = CHOICES[choice]
    told = model_class.config_class(**SIZES | options | {"router_aux_loss_coef": 0.037}).to_dict()
    table = names.table(told, ())
    config = MoETransformerConfig(**table | {"mlp_only_layers": tuple(table.get("mlp_only_layers", ()))})
    weight = config.aux_loss_coeff * config.moe_layers
    assert config.moe_layers == layers
    assert weight == pytest.approx(0.037 * options["num_experts_per_tok"], rel=1e-10)
    exported = names.config(config)
    assert exported["router_aux_loss_coef"] == 0.037
    assert model_class.config_class(**exported).router_aux_loss_coef == 0.037
    assert names.table(exported, ())["aux_loss_coeff"] == config.aux_loss_coeff


RECIPE = """
extends = "ours/model.toml"
run = { steps = 1, device = "cpu", weights = "theirs" }
batch = { sequences = 2, microbatch = 2, length = 24 }
evaluation = { sequences = 0 }
optimizer = { use = "sgd", lr = 0.1 }
data = { use = "synthetic", vocab = 64 }
"""


def test_what_a_run_makes_of_it_is_what_transformers_computes(tmp_path):
    model = theirs("qwen3-mixed", tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('"theirs"', f'"{tmp_path / "theirs"}"'))
    RuntimeEngine.from_recipe(tmp_path / "recipe.toml", folder=tmp_path / "run").fit()
    convert(tmp_path / "run", tmp_path / "exported", load_plugins())
    before, after = tensors_at(tmp_path / "ours"), tensors_at(tmp_path / "exported")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    exported = type(model).from_pretrained(tmp_path / "exported", attn_implementation="eager")
    assert (our_logits(tmp_path / "run") - logits(exported)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("choice", "change", "text"),
    [
        ("qwen3", {"use_sliding_window": "yes"}, "use_sliding_window is 'yes'"),
        ("qwen3", {"mlp_only_layers": 3}, "mlp_only_layers is 3; expected a list of layers"),
        ("qwen3", {"num_experts": 5}, "num_local_experts is 8; only 5 can be represented"),
        ("mixtral", {"num_experts": 5}, "num_experts is 5; only 6 can be represented"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("mixtral", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
    ],
)
def test_what_cannot_be_represented_is_refused(choice, change, text, tmp_path):
    theirs(choice, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(NanotrainError, match=r"config\.json") as refusal:
        open_weights(tmp_path, load_plugins())
    assert text in str(refusal.value)


@pytest.mark.parametrize(
    "change",
    [
        {"mlp_only_layers": (0,)},
        {"normalize_weights": False},
        {"bias": True},
        {"positions": "learned", "max_length": 64},
        {"norm": "layernorm"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_model_that_transformers_has_not_is_refused(change):
    config = attrs.evolve(MoETransformerConfig(**MIXTRAL), **change)
    with pytest.raises(NanotrainError, match=r"neither a Mixtral|none of these"):
        names.config(config)


@pytest.mark.parametrize("table", [MIXTRAL, QWEN3], ids=["mixtral", "qwen3"])
def test_a_window_of_some_layers_is_refused(table):
    kinds = {"window": 4, "layer_types": ("sliding_attention", "full_attention")}
    with pytest.raises(NanotrainError, match="some of its layers have a window"):
        names.config(MoETransformerConfig(**table | kinds | {"mlp_only_layers": ()}))


def test_dense_layers_are_those_of_a_qwen3_moe():
    qwen3 = MoETransformerConfig(**QWEN3 | {"mlp_only_layers": (0,)})
    assert names.config(qwen3)["architectures"] == ["Qwen3MoeForCausalLM"]
