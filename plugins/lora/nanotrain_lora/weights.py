"""Adapters in saved weights: merged into the model, or alone, in a folder that ``peft`` loads."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

import attrs
import torch

from nanotrain_core.api import HFTensor, NanotrainError, ParameterMapping, Shape
from nanotrain_core.api.torch import AddedWeights, WeightReader
from nanotrain_lora import LoRAConfig

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


class LoRAWeights(AddedWeights):
    """What ``Component.added`` of ``lora`` names."""

    form = "peft"

    def merge(self, config: LoRAConfig, reader: WeightReader) -> WeightReader:
        """Return the weights of the model, W + scale B A, rounded to the dtype of W."""
        return Merged(reader, config.scale)

    def files(
        self, config: LoRAConfig, reader: WeightReader, mappings: Iterable[ParameterMapping]
    ) -> Mapping[str, str | Mapping[str, torch.Tensor]]:
        """Return ``adapter_config.json`` and ``adapter_model.safetensors``.

        Raises:
            NanotrainError: a layer is not one matrix in transformers.
        """
        return peft_files(config, reader, mappings)


weights = LoRAWeights()


def adapted(reader: WeightReader) -> list[str]:
    """Return the layers that have adapters, by name."""
    return [name.removesuffix(".lora_a") for name in reader.shapes if name.endswith(".lora_a")]


class Merged:
    """See :class:`~nanotrain_core.contracts.WeightReader`."""

    def __init__(self, reader: WeightReader, scale: float) -> None:
        self.reader, self.scale = reader, scale
        self.layers = {f"{name}.weight": name for name in adapted(reader)}
        own = {f"{name}.lora_{key}" for name in self.layers.values() for key in "ab"}
        self.shapes: Mapping[str, Shape] = {n: s for n, s in reader.shapes.items() if n not in own}
        self.dtypes = {name: reader.dtypes[name] for name in self.shapes}

    def damage(self) -> Sequence[str]:
        """Return what is wrong with the weights."""
        return self.reader.damage()

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return one block: of a layer with an adapter, computed in float32 or wider."""
        block = self.reader.read(name, index)
        if name not in self.layers:
            return block
        layer, (rows, columns) = self.layers[name], index
        a, b = f"{layer}.lora_a", f"{layer}.lora_b"
        every = slice(0, self.reader.shapes[a][0])
        wide = torch.promote_types(block.dtype, torch.float32)
        of_a, of_b = self.reader.read(a, (every, columns)), self.reader.read(b, (rows, every))
        return (block.to(wide) + self.scale * (of_b.to(wide) @ of_a.to(wide))).to(block.dtype)


@attrs.define(frozen=True)
class Share:
    """One of our layers in a matrix of transformers."""

    layer: str
    hf: HFTensor


def peft_files(
    config: LoRAConfig, reader: WeightReader, mappings: Iterable[ParameterMapping]
) -> dict[str, str | Mapping[str, torch.Tensor]]:
    """Return the files of a PEFT adapter.

    A matrix that transformers has of several of our layers, such as GPT-2's of queries, keys and values, gets
    one adapter of all of theirs: their As one below the other, their Bs in blocks.
    """
    known = list(mappings)
    ours, of_hf = set(adapted(reader)), defaultdict[str, list[Share]](list)
    for mapping in known:
        layer, dot, key = mapping.name.rpartition(".")
        if layer in ours and f"{dot}{key}" == ".weight":
            if not isinstance(mapping.hf, HFTensor):
                raise NanotrainError(
                    f"{layer} is {len(mapping.hf)} matrices in transformers: no PEFT adapter"
                )
            if mapping.hf.columns is not None and mapping.hf.rows is None:
                raise NanotrainError(f"{layer} is columns of a matrix in transformers: no PEFT adapter")
            of_hf[mapping.hf.name.removesuffix(".weight")].append(Share(layer, mapping.hf))
    expect_apart(of_hf, known)
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    for module, shares in of_hf.items():
        a, b = zip(*(matrices(reader, share) for share in shares), strict=True)
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.cat(a).contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = of_all(known, module, shares, reader, b)
        ranks[module] = config.rank * len(shares)
    other = {module: rank for module, rank in ranks.items() if rank != config.rank}
    alphas = {
        module: config.alpha * (sqrt if config.rslora else float)(rank / config.rank)
        for module, rank in other.items()
    }
    table: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "use_rslora": config.rslora,
        "bias": "none",
        "fan_in_fan_out": any(share.hf.transposed for shares in of_hf.values() for share in shares),
        "target_modules": targets(list(of_hf), hf_names(known)),
        "rank_pattern": other,
        "alpha_pattern": alphas,
        "inference_mode": True,
    }
    return {CONFIG: json.dumps(table, indent=2) + "\n", TENSORS: tensors}


def expect_apart(modules: Iterable[str], mappings: Iterable[ParameterMapping]) -> None:
    """Refuse modules that have the names of routed experts' matrices: peft would take them for experts.

    It drops their adapters, with a warning, since transformers stacks the experts.
    """
    experts = (each.name for m in mappings if isinstance(m.hf, tuple) for each in m.hf)
    names = {name.removesuffix(".weight").rpartition(".")[2] for name in experts}
    for module in modules:
        if module.rpartition(".")[2] in names:
            raise NanotrainError(
                f"peft takes an adapter of {module} for one of routed experts, whose matrices have its name, "
                'and drops it: write the merged model (without --to), or train targets = ["attn"]'
            )


def hf_names(mappings: Iterable[ParameterMapping]) -> Iterator[str]:
    """Yield the names of all tensors in transformers."""
    for mapping in mappings:
        yield from (each.name for each in (mapping.hf if isinstance(mapping.hf, tuple) else (mapping.hf,)))


def matrices(reader: WeightReader, share: Share) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A with its columns as in transformers, and B."""
    a, b = (
        reader.read(name, tuple(slice(0, size) for size in reader.shapes[name]))
        for name in (f"{share.layer}.lora_a", f"{share.layer}.lora_b")
    )
    columns = share.hf.columns
    return a if columns is None else a[:, torch.tensor(columns).argsort()], b


def of_all(
    mappings: Iterable[ParameterMapping],
    module: str,
    shares: Sequence[Share],
    reader: WeightReader,
    each: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return B [out, ranks] of a matrix in transformers: each layer's rows, where they are in it."""
    name = f"{module}.weight"
    parts = [m.name for m in mappings if isinstance(m.hf, HFTensor) and m.hf.name == name]
    rows, rank = sum(reader.shapes[part][0] for part in parts), each[0].shape[1]
    if len(parts) == 1:
        rows = len(each[0])
    found = each[0].new_zeros(rows, rank * len(shares))
    for number, (share, b) in enumerate(zip(shares, each, strict=True)):
        at = range(len(b)) if share.hf.rows is None else share.hf.rows
        found[torch.tensor(at), rank * number : rank * (number + 1)] = b
    return found


def targets(modules: Sequence[str], tensors: Iterable[str]) -> list[str]:
    """Return PEFT's ``target_modules``: last names, if all modules of these names have adapters.

    >>> targets(["a.0.q", "a.1.q"], ["a.0.q.weight", "a.1.q.weight", "a.0.k.weight"])
    ['q']
    >>> targets(["a.0.q"], ["a.0.q.weight", "a.1.q.weight"])
    ['a.0.q']
    """
    last = {module.rpartition(".")[2] for module in modules}
    named = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight")}
    alike = {name for name in named if name.rpartition(".")[2] in last}
    return sorted(last if alike == {*modules} else modules)
