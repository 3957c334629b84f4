"""Hugging Face's RoPE options for DeepSeek's models and Mistral 4. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nanotrain_core.api import (
    HFError,
    expect,
    expect_number,
    expect_size,
    read_rope,
    write_rope,
    yarn_magnitude,
)
from nanotrain_deepseek.config import DeepSeekConfig, YarnConfig

_ORIGINAL = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"


def rope_table(f: Mapping[str, Any], *, mistral: bool) -> dict[str, Any]:
    """Return the keys of ``[model]`` for the contents of a ``config.json``."""
    if mistral:
        theta, kind, options = read_rope(_without_share(f), "yarn", "linear")
        expect({"rope_type": kind}, "rope_type", "yarn", "linear")  # by default its class rotates whole heads
        expect(options, "llama_4_scaling_beta", 0.0)
    else:
        theta, kind, options = read_rope(f, "yarn")
    if kind != "yarn":
        expect(options, "factor", 1.0)
        return {"rope_theta": theta}
    expect(options, "truncate", True)
    length = expect_size(options, _ORIGINAL)
    factor = float(options.get("factor") or expect_size(f, "max_position_embeddings") / length)
    mscale, all_dim = _mscales(options, factor)
    yarn = {
        "factor": factor,
        "original_length": length,
        "beta_fast": float(options.get("beta_fast") or 32),
        "beta_slow": float(options.get("beta_slow") or 1),
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }
    return {"rope_theta": theta, "yarn": yarn}


def _mscales(options: Mapping[str, Any], factor: float) -> tuple[float, float]:
    """Return ``mscale`` and ``mscale_all_dim``.

    Transformers scales the rotated elements by ``attention_factor`` if present. Otherwise, if one of the two
    is 0, it takes ``mscale`` as 1 and the other as 0, unlike the released code.
    """
    mscale, all_dim = options.get("mscale"), float(options.get("mscale_all_dim") or 0.0)
    if options.get("attention_factor") is None:
        if bool(mscale) != bool(all_dim) and (all_dim or mscale != 1.0):
            raise HFError("config.json: mscale and mscale_all_dim must be given both or neither")
        return float(mscale or 1.0), all_dim
    magnitude, temperature = expect_number(options, "attention_factor"), yarn_magnitude(factor, all_dim)
    if mscale is not None and math.isclose(yarn_magnitude(factor, mscale) / temperature, magnitude):
        return float(mscale), all_dim
    return (magnitude * temperature - 1.0) / (0.1 * math.log(factor)), all_dim


def _without_share(f: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the option for the rotated part of a head in Mistral 4, if that is ``qk_rope_head_dim``."""
    size, result = expect_size(f, "qk_nope_head_dim") + expect_size(f, "qk_rope_head_dim"), dict(f)
    for name in ("rope_parameters", "rope_scaling"):
        table = f.get(name) or {}
        if int(size * table.get(_SHARE, 0)) == f["qk_rope_head_dim"]:
            result[name] = {key: value for key, value in table.items() if key != _SHARE}
    return result


def rope_options(c: DeepSeekConfig, *, mistral: bool) -> dict[str, Any]:
    """Return the entries of a ``config.json``."""
    options = _yarn_parameters(c.yarn) if c.yarn else {}
    if not mistral:
        return write_rope(c.rope_theta, "yarn" if c.yarn else "default", options)
    share = c.rope_size / c.qk_size
    share = share if int(c.qk_size * share) == c.rope_size else math.nextafter(share, 1.0)
    if not c.yarn:  # with this type, unlike the default one, its class rotates part of a head
        options = {"factor": 1.0, _ORIGINAL: c.max_length or 1}
    options |= {"llama_4_scaling_beta": 0.0, _SHARE: share}
    return write_rope(c.rope_theta, "yarn" if c.yarn else "linear", options)


def _yarn_parameters(yarn: YarnConfig) -> dict[str, Any]:
    """Transformers ignores ``mscale`` unless both are above 0: then their magnitude is written, too."""
    found = {
        "factor": yarn.factor,
        _ORIGINAL: yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    scales = {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    if yarn.mscale and yarn.mscale_all_dim:
        return found | scales
    return found if yarn.mscale == 1.0 else found | scales | {"attention_factor": yarn.magnitude}
