"""The rotary embedding options of Llama, Mistral and Qwen in transformers. Never imports torch.

Defaults, and the precedence of two keys, are those of its ``modeling_rope_utils``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nanotrain_core.builtin.transformer_config import RopeScalingConfig, TransformerConfig, yarn_magnitude
from nanotrain_core.hf.mapping import HFError, expect_size
from nanotrain_core.hf.rope import expect_number, read_rope, write_rope

_ORIGINAL = "original_max_position_embeddings"

#: ``model_type`` -> default of a ``config.json`` without ``max_position_embeddings``.
_MOST = {"llama": 2048, "mistral": 131072, "ministral": 131072, "qwen2": 32768, "qwen3": 32768}


def rope_table(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ``[model]`` for a ``config.json``.

    Raises:
        HFError: it cannot be represented, or means different things to different versions.
    """
    theta, kind, options = read_rope(hf, *_READERS)
    table: dict[str, Any] = {"rope_theta": theta, "max_length": hf.get("max_position_embeddings") or 0}
    if kind == "default":
        return table
    if kind == "dynamic":
        table["max_length"] = 0  # it is the original length, and sequences may be longer
    return table | {"rope_scaling": {"type": kind, **_READERS[kind](options, hf)}}


def rope_options(config: TransformerConfig) -> dict[str, Any]:
    """Return the entries of a ``config.json``."""
    scaling, length = config.rope_scaling, config.max_length
    if scaling is None:
        found = write_rope(config.rope_theta)
    else:
        found = write_rope(config.rope_theta, scaling.type, _WRITERS[scaling.type](scaling))
        if scaling.type == "dynamic":
            length = scaling.original_length
        elif scaling.type == "yarn":
            length = length or round(scaling.factor * scaling.original_length)
    return found | ({"max_position_embeddings": length} if length else {})


# --- each type --------------------------------------------------------------------------------


def _read_linear(options: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"factor": expect_number(options, "factor")}


def _read_dynamic(options: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """Its original length is ``max_position_embeddings``; some versions read the other key."""
    longest, other = _longest(hf), options.get(_ORIGINAL)
    if other not in (None, longest):
        raise HFError(
            f"config.json: the original length of its dynamic RoPE is {longest} in max_position_embeddings "
            f"and {other} in {_ORIGINAL}; leave the second out"
        )
    return {"factor": expect_number(options, "factor"), "original_length": longest}


def _read_llama3(options: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    scaling = {name: expect_number(options, name) for name in names}
    return {**scaling, "original_length": _original(options, hf)}


def _read_yarn(options: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    length = _original(options, hf)
    given = options.get("factor") is not None
    factor = expect_number(options, "factor") if given else _longest(hf) / length
    scaling: dict[str, Any] = {"factor": factor, "original_length": length}
    for name in ("beta_fast", "beta_slow"):
        if options.get(name):
            scaling[name] = expect_number(options, name)
    if not options.get("truncate", True):
        scaling["truncate"] = False
    if options.get("attention_factor") is not None:
        scaling["attention_factor"] = expect_number(options, "attention_factor")
        if scaling["attention_factor"] <= 0.0:
            raise HFError("config.json: attention_factor of its RoPE is 0 or less; expected more")
    elif options.get("mscale") and options.get("mscale_all_dim"):
        one, other = (expect_number(options, name) for name in ("mscale", "mscale_all_dim"))
        scaling["attention_factor"] = yarn_magnitude(factor, one) / yarn_magnitude(factor, other)
    return scaling


_READERS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]] = {
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "linear": _read_linear,
    "dynamic": _read_dynamic,
}


def _write_factor(scaling: RopeScalingConfig) -> dict[str, Any]:
    return {"factor": scaling.factor}


def _write_llama3(scaling: RopeScalingConfig) -> dict[str, Any]:
    return {
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        _ORIGINAL: scaling.original_length,
    }


def _write_yarn(scaling: RopeScalingConfig) -> dict[str, Any]:
    """Omit an ``attention_factor`` that is unset, so that it is unset when read again."""
    found = {
        "factor": scaling.factor,
        _ORIGINAL: scaling.original_length,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    }
    found |= {"attention_factor": scaling.attention_factor} if scaling.attention_factor else {}
    return found if scaling.truncate else found | {"truncate": False}


_WRITERS: Mapping[str, Callable[[RopeScalingConfig], dict[str, Any]]] = {
    "llama3": _write_llama3,
    "yarn": _write_yarn,
    "linear": _write_factor,
    "dynamic": _write_factor,
}


def _longest(hf: Mapping[str, Any]) -> int:
    return expect_size({"max_position_embeddings": _MOST[hf["model_type"]], **hf}, "max_position_embeddings")


def _original(options: Mapping[str, Any], hf: Mapping[str, Any]) -> int:
    """Return the length before scaling; some files have it next to the options."""
    found = {name[_ORIGINAL] for name in (options, hf) if name.get(_ORIGINAL) is not None}
    if len(found) > 1:
        both = f"{options[_ORIGINAL]} in its RoPE and {hf[_ORIGINAL]} beside it"
        raise HFError(f"config.json: {_ORIGINAL} is {both}; leave one of them out")
    return expect_size({_ORIGINAL: next(iter(found))}, _ORIGINAL) if found else _longest(hf)
