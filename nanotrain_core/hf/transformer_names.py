"""The HF mapping of the model ``transformer``: Llama, Mistral, Qwen and GPT-2. Never imports torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.hf.gpt2 import GPT2, gpt2_config, gpt2_mappings, gpt2_table, is_gpt2
from nanotrain_core.hf.llama import llama_config, llama_mappings, llama_table, llama_type
from nanotrain_core.hf.mapping import HFError, HFMapping, ParameterMapping


class TransformerNames(HFMapping):
    """The :class:`~nanotrain_core.hf.mapping.HFMapping` of the model ``transformer``."""

    model_types = ("llama", "mistral", "ministral", "qwen2", "qwen3", "gpt2")
    #: Rotary frequencies of old Llama files, and GPT-2's causal masks.
    ignored = (r".*\.rotary_emb\.inv_freq", r".*\.attn\.(masked_)?bias")

    def table(self, hf: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return the ``[model]`` table."""
        return gpt2_table(hf) if hf["model_type"] == "gpt2" else llama_table(hf)

    def config(self, config: TransformerConfig) -> dict[str, Any]:
        """Return a ``config.json``.

        Raises:
            HFError: transformers has no such model.
        """
        kind = model_type(config)
        return gpt2_config(config) if kind == "gpt2" else llama_config(config, kind)

    def mappings(self, config: TransformerConfig) -> Iterator[ParameterMapping]:
        """Yield every parameter, layer by layer."""
        return gpt2_mappings(config) if model_type(config) == "gpt2" else llama_mappings(config)


#: What a model of transformers is, in keys of ``[model]``.
_KNOWN = (
    "Llama: positions = 'rope', norm = 'rmsnorm', activation = 'swiglu', output_bias as attention_bias; "
    "Mistral: a Llama without biases, with window; Ministral: a Mistral with layer_types; "
    "Qwen2: a Llama with attention_bias = True, output_bias = False, ffn_bias = False; "
    "Qwen3: a Llama with qk_norm = True, ffn_bias = False; "
    "GPT-2: positions = 'learned', norm = 'layernorm', activation = 'gelu', all biases"
)


def model_type(config: TransformerConfig) -> str:
    """Return the ``model_type`` in transformers of a model that computes what ``config`` says.

    Raises:
        HFError: there is none.
    """
    kind = "gpt2" if is_gpt2(config) else llama_type(config)
    if kind is None:
        keys = (*GPT2, "attention_bias", "output_bias", "ffn_bias", "qk_norm", "window")
        ours = ", ".join(f"{key} = {getattr(config.resolved(), key)!r}" for key in keys)
        raise HFError(f"it is none of these: {_KNOWN}; it has {ours}")
    return kind


names = TransformerNames()
