"""Backends of FP8 GEMMs: one interface, chosen by device or by the recipe, and never changed silently."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

import attrs
import torch

from nanotrain_core.api import NanotrainError
from nanotrain_core.api.torch import GEMMBackend
from nanotrain_fp8_deepseek_v3 import lacking_tensor_cores
from nanotrain_fp8_deepseek_v3.formats import TILE
from nanotrain_fp8_deepseek_v3.gemm import FP8Recipe
from nanotrain_fp8_deepseek_v3.graphed import GraphedEmulation, GraphedMX
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache

#: The first Transformer Engine with block scales.
TE_NEEDED = "2.3"


@attrs.define(frozen=True)
class Backend:
    """One implementation of the GEMMs."""

    name: str
    make: Callable[[FP8Recipe, OperandCache], GEMMBackend]
    refusal: Callable[[torch.device, FP8Recipe], str]
    """Why it cannot run there; empty if it can."""


def _anywhere(device: torch.device, recipe: FP8Recipe) -> str:
    return ""


def _needs_torch(device: torch.device, recipe: FP8Recipe) -> str:
    """Return why torch's scaled GEMMs cannot run on ``device``; empty if they can."""
    if device.type == "cuda" and not hasattr(torch.nn.functional, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm: 2.10 brought it"
    return _needs_gpu(device, recipe) or (_disagreement(device, recipe) if recipe.mx else "")


def _needs_gpu(device: torch.device, recipe: FP8Recipe) -> str:
    """Return why FP8 GEMMs on tensor cores cannot run on ``device``; empty if they can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, this is {device.type}"
    found, cuda = torch.cuda.get_device_capability(device), torch.version.cuda or "0"
    built = tuple(map(int, cuda.split(".")))
    if recipe.mx and built < (12, 8):
        return f"blocks of 32 need CUDA 12.8, this torch was built with {cuda}"
    if recipe.tile and not recipe.mx and built < (12, 9):
        return f"tiles of 128 need CUDA 12.9, this torch was built with {cuda}"
    return lacking_tensor_cores(found, tiles=bool(recipe.tile) and not recipe.mx, mx=bool(recipe.mx))


def _needs_triton(device: torch.device, recipe: FP8Recipe) -> str:
    """Return why Triton's kernels, or torch's GEMMs of their outputs, cannot run; empty if they can."""
    if recipe.tile != TILE:
        return "its kernels round tiles of 128; 'torch' has one scale for a whole tensor"
    return _needs_torch(device, recipe) or _missing("triton", "triton") or _disagreement(device, recipe)


def _disagreement(device: torch.device, recipe: FP8Recipe) -> str:
    """Return how Triton's kernels, or torch's GEMMs of MX, differ from the reference on this device."""
    from nanotrain_fp8_deepseek_v3.first_use import disagreement, disagreement_of_mx

    try:
        return disagreement_of_mx(device, recipe) if recipe.mx else disagreement(device)
    except Exception as error:  # compilers raise arbitrary exceptions
        return f"its kernels fail on {device}: {error}"


def _needs_te(device: torch.device, recipe: FP8Recipe) -> str:
    """Return why Transformer Engine's GEMMs cannot run on ``device``; empty if they can."""
    if recipe.tile != TILE:
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


def _emulated(recipe: FP8Recipe, cache: OperandCache) -> GEMMBackend:
    return GraphedMX(recipe, cache) if recipe.mx else GraphedEmulation(recipe, cache)


def _torch(recipe: FP8Recipe, cache: OperandCache) -> GEMMBackend:
    from nanotrain_fp8_deepseek_v3.scaled import ScaledFP8
    from nanotrain_fp8_deepseek_v3.scaled_mx import ScaledMX

    return ScaledMX(recipe, cache) if recipe.mx else ScaledFP8(recipe, cache)


def _needs_meta(device: torch.device, recipe: FP8Recipe) -> str:
    return "" if device.type == "meta" else f"it has no numbers, for a dry run on meta; this is {device.type}"


def _dry(recipe: FP8Recipe, cache: OperandCache) -> GEMMBackend:
    from nanotrain_fp8_deepseek_v3.dry import DryFP8

    return DryFP8(recipe, cache)


def _triton(recipe: FP8Recipe, cache: OperandCache) -> GEMMBackend:
    from nanotrain_fp8_deepseek_v3.fused import TritonFP8

    return TritonFP8(recipe, cache)


def _te(recipe: FP8Recipe, cache: OperandCache) -> GEMMBackend:
    from nanotrain_fp8_deepseek_v3.te import TransformerEngineFP8

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


def choose(wanted: str, device: torch.device, recipe: FP8Recipe) -> Backend:
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


def automatic(device: torch.device, recipe: FP8Recipe) -> str:
    """Return the name of a device's backend: on a GPU the one that rounds a tile in one pass over memory."""
    if device.type in ("cpu", "meta"):
        return "emulated" if device.type == "cpu" else "dry"
    return "triton" if recipe.tile == TILE else "torch"


def _others(name: str, device: torch.device, recipe: FP8Recipe) -> str:
    """List the other backends except the emulation that can run on a device."""
    found = [
        f"'{other.name}'"
        for other in BACKENDS.values()
        if other.name not in (name, "emulated") and not other.refusal(device, recipe)
    ]
    return f"{' and '.join(found)} can, " if found else ""
