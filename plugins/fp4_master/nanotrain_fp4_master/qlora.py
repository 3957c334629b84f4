"""The ``qlora`` component: bfloat16, in which the matrices that a wrapper has frozen are held in NF4.

A frozen matrix is rounded once, after the run's weights are loaded, and unpacked for each GEMM that reads it:
forward and dgrad. Nothing unpacked is held between them, and there is no wgrad. What is trained, such as the
adapters of ``lora``, is as under ``bf16``.

Blocks of weights with one scale lie in the rows of a rank's matrix, so they are the same on every layout.

Source: Dettmers et al., "QLoRA", arXiv 2305.14314, section 3, whose scales are quantized to eight bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from nanotrain_core.api import Layout, NanotrainError, Problem, Recipe, Role, lies_in, tagged
from nanotrain_core.api.torch import (
    RANGE,
    DequantizingGEMM,
    GEMMBackend,
    Mesh,
    NoLossScale,
    Passes,
    TorchGEMM,
    Uniform,
    cast,
    gemm_parameters,
    use_gemm,
)
from nanotrain_fp4_master import BLOCKS, QLoRAConfig
from nanotrain_fp4_master.blocks import NF4Blocks
from nanotrain_fp4_master.packing import FourBits
from nanotrain_fp4_master.table import Row, lines, of_all_stages


class QLoRA(Uniform):
    """See :class:`~nanotrain_core.contracts.Precision`."""

    def __init__(self, config: QLoRAConfig) -> None:
        super().__init__(torch.bfloat16, NoLossScale())
        self.config, self.four_bits = config, FourBits(NF4Blocks(config.block_size))
        self.passes = Passes()
        self.gemm: GEMMBackend = TorchGEMM()
        self.roles: dict[str, str] = {}
        """Of the matrices that are packed, by the name of the parameter."""
        self.rows: list[Row] = []

    def setup(self, seed: int, passes: Passes, gemm: GEMMBackend) -> None:
        """Keep the run's passes and GEMM backend."""
        self.passes, self.gemm = passes, gemm

    def convert(self, part: nn.Module) -> nn.Module:
        """Cast to bfloat16, and have layers unpack their frozen matrices for each GEMM.

        Raises:
            NanotrainError: a rank's rows of one are no whole number of blocks.
        """
        super().convert(part)
        backend = DequantizingGEMM(self.gemm, self.four_bits)
        for prefix, module, found in tagged(part):
            names = {name: f"{prefix}.{name}" if prefix else name for name in gemm_parameters(module)}
            low = [full for name, full in names.items() if self._is_packed(full, getattr(module, name))]
            if low:
                use_gemm(module, dict.fromkeys(names, backend), self.passes)
                self.roles |= dict.fromkeys(low, found.role.name.lower())
        return part

    def _is_packed(self, name: str, weight: nn.Parameter) -> bool:
        packed = self.is_low(name, weight)
        if packed and weight.shape[-1] % self.config.block_size:
            raise NanotrainError(uneven(name, weight.shape[-1], self.config.block_size))
        return packed

    def is_low(self, name: str, weight: nn.Parameter) -> bool:
        """Return whether the weight of a linear layer or of experts is held in NF4."""
        kept = any(lies_in(name, pattern) for pattern in self.config.keep)
        return not (kept or weight.requires_grad or weight.dtype != self.parameter_dtype)

    def check_parts(self, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        """Reject patterns that match no parameter, and build the table of all stages. Gathers over pp."""
        parameters = [named for part in parts for named in part.named_parameters()]
        names = [name for name, _ in parameters]
        self.rows = of_all_stages(names, [*self._table(parameters)], self.config.keep, mesh)

    def _table(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> Iterator[Row]:
        for name, each in parameters:
            if name in self.roles:
                yield Row(self.roles[name], "nf4, frozen", each.numel(), self.four_bits.width / RANGE)
            else:
                master = 4 if each.requires_grad and each.dtype == self.parameter_dtype else 0
                what = f"{str(each.dtype).removeprefix('torch.')}, {'trained' if master else 'frozen'}"
                yield Row("all else", what, each.numel(), each.dtype.itemsize + master)

    def describe(self) -> list[str]:
        """Return lines with the bytes per parameter of weights and masters, by role and in total."""
        total = sum(row.parameters for row in self.rows)
        in_bf16 = sum(row.parameters * max(row.bytes_each, 2) for row in self.rows)  # 2: what is packed
        return lines(self.rows, in_bf16 / max(1, total))

    def packing(self, name: str, parameter: nn.Parameter) -> FourBits | None:
        """Return the format of frozen matrices."""
        return self.four_bits if name in self.roles else None


def uneven(name: str, columns: int, block: int) -> str:
    """Return an error text: rows of a matrix are no whole number of blocks; with what would be."""
    smaller = [size for size in BLOCKS["nf4"] if size < block and not columns % size]
    fits = f"precision.block_size = {smaller[0]}; " if smaller else ""
    return (
        f"{name}: a rank's rows of {columns} weights are no whole number of blocks of {block}, which share a "
        f"scale: expected {fits}fewer ranks, if tp or another wrapper splits them; or, to keep it as it is, "
        f'precision.keep = ["{name}"]'
    )


def check_model(
    recipe: Recipe, config: QLoRAConfig, layout: Layout, model: Callable[[], nn.Module]
) -> Iterator[Problem]:
    """Yield a problem if a rank's rows of frozen matrices of the model are no whole number of blocks."""
    precision, block, rows = QLoRA(config), config.block_size, dict[str, int]()
    for prefix, module, found in tagged(cast(model(), precision.parameter_dtype)):
        for name in gemm_parameters(module):
            full, weight = f"{prefix}.{name}" if prefix else name, getattr(module, name)
            dim = "tp" if found.role is Role.ROW else "etp" if found.split.get(name) == 2 else ""
            columns, rest = divmod(weight.shape[-1], layout.degree(dim))
            if precision.is_low(full, weight) and not rest:  # what does not divide is refused elsewhere
                rows[full] = columns
    wrong = [name for name, columns in rows.items() if columns % block]
    if wrong:
        fits = [f"{size}" for size in BLOCKS["nf4"] if not any(columns % size for columns in rows.values())]
        keep = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in wrong)
        expected = [*fits[:1], f"precision.keep = {json.dumps([*keep])}"]
        more = f" and those of {len(wrong) - 1} more matrices" if len(wrong) > 1 else ""
        yield Problem(
            "precision.block_size",
            f"rows of {wrong[0]}, {rows[wrong[0]]} weights on a rank,{more} are no whole number of blocks of "
            f"{block}, which share a scale; expected {' or '.join(expected)}",
        )
