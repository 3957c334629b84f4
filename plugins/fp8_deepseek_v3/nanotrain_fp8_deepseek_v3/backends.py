"""Backends of FP8 GEMMs: one interface, chosen by device or by the recipe, and never changed silently."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

import attrs
import torch

from nanotrain_core.api import NanotrainError
from nanotrain_core.api.torch import GEMMBackend
from nanotrain_fp8_deepseek_v3.gemm import FP8Recipe
from nanotrain_fp8_deepseek_v3.graphed import GRAPHED
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.recipe import Recipe
from nanotrain_fp8_deepseek_v3.units import TILES

#: The first Transformer Engine with block scales.
TE_NEEDED = "2.3"


@attrs.define(frozen=True)
class Backend:
    """One implementation of the GEMMs."""

    name: str
    make: Callable[[Recipe, OperandCache], GEMMBackend]
    refusal: Callable[[torch.device, Recipe], str]
    """Why it cannot run there; empty if it can."""


def _anywhere(device: torch.device, recipe: Recipe) -> str:
    return ""


def _needs_torch(device: torch.device, recipe: Recipe) -> str:
    """Return why torch's scaled GEMMs cannot run on ``device``; empty if they can."""
    if device.type == "cuda" and not hasattr(torch.nn.functional, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm: 2.10 brought it"
    return _needs_gpu(device, recipe) or (_disagreement(device, recipe) if recipe.COMPARED else "")


def _needs_gpu(device: torch.device, recipe: Recipe) -> str:
    """Return why these GEMMs on tensor cores cannot run on ``device``; empty if they can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, this is {device.type}"
    lacks = recipe.units.lacks_cuda(torch.version.cuda or "0")
    return lacks or recipe.units.lacks(torch.cuda.get_device_capability(device))


def _needs_triton(device: torch.device, recipe: Recipe) -> str:
    """Return why Triton's kernels, or torch's GEMMs of their outputs, cannot run; empty if they can."""
    if recipe.units is not TILES:
        return "its kernels round tiles of 128; 'torch' has one scale for a whole tensor"
    return _needs_torch(device, recipe) or _missing("triton", "triton") or _disagreement(device, recipe)


def _disagreement(device: torch.device, recipe: Recipe) -> str:
    """Return how Triton's kernels, or torch's GEMMs, differ from the reference on this device."""
    from nanotrain_fp8_deepseek_v3.first_use import disagreement, disagreement_of_torch

    try:
        return disagreement_of_torch(device, recipe) if recipe.COMPARED else disagreement(device)
    except Exception as error:  # compilers raise arbitrary exceptions
        return f"its kernels fail on {device}: {error}"


def _needs_te(device: torch.device, recipe: Recipe) -> str:
    """Return why Transformer Engine's GEMMs cannot run on ``device``; empty if they can."""
    if recipe.units is not TILES:
        return "it rounds tiles of 128; 'torch' has one scale for a whole tensor"
    refusal = _needs_gpu(device, recipe) or _missing("transformer_engine", "transformer-engine[pytorch]")
    return refusal or _unfit_te()


def _unfit_te() -> str:
    """Return why the installed Transformer Engine cannot be used."""
    try:
        import_module("nanotrain_fp8_deepseek_v3.te")
    except Exception as error:  # one built for another torch raises arbitrary exceptions
        version = getattr(sys.modules.get("transformer_engine"), "__version__", "the one installed")
        return f"it needs Transformer Engine {TE_NEEDED} or later, and {version} cannot be used: {error}"
    return ""


def _missing(module: str, package: str) -> str:
    from importlib.util import find_spec

    return "" if find_spec(module) else f"{package} is not installed"


def _emulated(recipe: Recipe, cache: OperandCache) -> GEMMBackend:
    return GRAPHED[type(recipe)](recipe, cache)


def _torch(recipe: Recipe, cache: OperandCache) -> GEMMBackend:
    from nanotrain_fp8_deepseek_v3.families import SCALED

    return SCALED[type(recipe)](recipe, cache)


def _needs_meta(device: torch.device, recipe: Recipe) -> str:
    return "" if device.type == "meta" else f"it has no numbers, for a dry run on meta; this is {device.type}"


def _dry(recipe: Recipe, cache: OperandCache) -> GEMMBackend:
    from nanotrain_fp8_deepseek_v3.families import DRY

    return DRY[type(recipe)](recipe, cache)


def _triton(recipe: Recipe, cache: OperandCache) -> GEMMBackend:
    from nanotrain_fp8_deepseek_v3.fused import TritonFP8

    assert isinstance(recipe, FP8Recipe)
    return TritonFP8(recipe, cache)


def _te(recipe: Recipe, cache: OperandCache) -> GEMMBackend:
    from nanotrain_fp8_deepseek_v3.te import TransformerEngineFP8

    assert isinstance(recipe, FP8Recipe)
    return TransformerEngineFP8(recipe, cache)


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("emulated", _emulated, _anywhere),
        Backend("torch", _torch, _needs_torch),
        Backend("triton", _triton, _needs_triton),
        Backend("te", _te, _needs_te),
        Backend("dry", _dry, _needs_meta),
    )
}


def choose(wanted: str, device: torch.device, recipe: Recipe) -> Backend:
    """Return the backend that the recipe names, or with ``auto`` the device's default.

    Raises:
        NanotrainError: it cannot run there; the text says why, and which can.
    """
    name = automatic(device, recipe) if wanted == "auto" else wanted
    refusal = BACKENDS[name].refusal(device, recipe)
    if refusal:
        chosen = f"'{name}', which auto chooses on {device.type}," if wanted == "auto" else f"'{name}'"
        raise NanotrainError(
            f"precision.backend: {chosen} cannot run: {refusal}; {_others(name, device, recipe)}"
            "'emulated' runs everywhere, slowly"
        )
    return BACKENDS[name]


def automatic(device: torch.device, recipe: Recipe) -> str:
    """Return the name of a device's backend: on a GPU the one that rounds a tile in one pass over memory."""
    if device.type in ("cpu", "meta"):
        return "emulated" if device.type == "cpu" else "dry"
    return "triton" if recipe.units is TILES else "torch"


def _others(name: str, device: torch.device, recipe: Recipe) -> str:
    """List the other backends except the emulation that can run on a device."""
    found = [
        f"'{other.name}'"
        for other in BACKENDS.values()
        if other.name not in (name, "emulated") and not other.refusal(device, recipe)
    ]
    return f"{' and '.join(found)} can, " if found else ""
