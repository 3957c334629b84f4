"""Shards the layers of a model over ranks: which parameter along which axis, which hook on which role.

COLUMN  weight [out, in] and bias by rows; the input enters.
ROW     weight [out, in] by columns; the output leaves.
PER_HEAD every parameter and buffer by its first axis.
VOCAB   table [V, D] by rows; the output leaves.
HEAD    weight [V, D] by rows; the input enters, the loss is summed.

Shard sizes of the vocabulary may differ by one, so that any vocabulary size works without padding.

Everything else is replicated on every rank. With sequence parallelism it sees only this rank's share of the
sequence, so that its gradient is partial.

Sources: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

import torch
from torch import nn

from nanotrain_core.api import (
    NanotrainError,
    Role,
    Tag,
    divisors_near,
    join_with_or,
    multiples_near,
    override_forward,
    share_tokens,
    tagged,
)
from nanotrain_core.api.torch import Mesh, Parallel, Placement, Placements
from nanotrain_tp import AXES, VOCABULARY, TensorParallelConfig
from nanotrain_tp.collectives import Ranks, SplitError
from nanotrain_tp.compiled import RanksInGraph
from nanotrain_tp.head import Rows
from nanotrain_tp.regions import BiasedRow, Experts, Head, ShardedRegion, Vocabulary


class TensorParallel(Parallel):
    """The ``tp`` component."""

    def __init__(self, config: TensorParallelConfig) -> None:
        self.config = config
        self._regions: list[ShardedRegion] = []

    def apply(self, part: nn.Module, placements: Placements, mesh: Mesh) -> nn.Module:
        """Leave this rank its blocks of ``part``, and install the hooks with the collectives.

        Raises:
            SplitError: heads or feed-forward width are not divisible by the number of ranks, or it is larger
                than the vocabulary.
            NanotrainError: sequences stay whole, and some gradients are not known to be partial or complete,
                or dropout would make ranks differ; or a HEAD would be trained without some of its parameters,
                or a linear layer without what its class adds.
        """
        if mesh.degree("tp") == 1:
            return part
        ranks = Ranks(mesh)
        config = self.config
        region = ShardedRegion(
            ranks,
            sequence_parallel=config.sequence_parallel,
            overlap=config.overlap,
            keep=not config.gather_again,
        )
        region.in_graph = RanksInGraph(ranks)
        self._regions.append(region)
        if not self.config.sequence_parallel:
            refuse_unknown(part)
            refuse_dropout(part)
        refuse_heads_with_more(part)
        refuse_linears_with_more(part)
        for name, module, tag in tagged(part):
            if is_copied(module, tag, ranks.size):
                copy(name, module, tag, placements, ranks)
            else:
                split(name, module, tag, placements, ranks)
        for name, module, tag in tagged(part):
            if tag.role in VOCABULARY:
                hook_vocabulary(module, tag, region, Rows.of(table_of(name, module, part, placements)))
            else:
                hook(module, tag, region)
        part.register_forward_pre_hook(region.begin, with_kwargs=True)
        self._sum_partial(part, placements)
        return part

    def splits_linear(self, mesh: Mesh) -> bool:
        """Return whether wgrads are placed where they overlap with the reduction of dgrads over ranks."""
        return any(region.places_wgrad for region in self._regions)

    def _sum_partial(self, part: nn.Module, placements: Placements) -> None:
        """Record which gradients are partial because a rank saw a share of the tokens, or of the heads.

        What later wrappers add is placed by them: they may complete a gradient themselves.
        """
        routers = set(parameters_of(part, Role.ROUTER))
        partial = {*parameters_of(part, Role.EXPERTS), *parameters_of(part, Role.INNER)}
        if self.config.sequence_parallel:
            partial = {name for name, _ in part.named_parameters()}
        for name in partial - routers:
            placement = placements[name]
            if "tp" in placement.same:  # else it is sharded, or another wrapper placed it in another view
                placements[name] = placement.sum_over("tp")


def parameters_of(part: nn.Module, role: Role) -> Iterator[str]:
    """Yield the names of all parameters in and below modules of a role."""
    for name, module, tag in tagged(part):
        if tag.role is role:
            for key, _ in module.named_parameters():
                yield f"{name}.{key}"


def refuse_unknown(part: nn.Module) -> None:
    """Reject parameters below ``part`` without a role: between COLUMN and ROW their gradients are partial.

    With sequence parallelism they are partial everywhere.
    """
    known = {
        f"{name}.{key}"
        for name, module, tag in tagged(part)
        if tag.role is not Role.BLOCK
        for key, _ in module.named_parameters()
    }
    for name, parameter in part.named_parameters():
        if "." in name and name not in known and parameter.requires_grad:
            raise NanotrainError(
                f"{name} has no role: where sequences stay whole, tp cannot tell whether each rank's "
                "gradient of it is partial. Tag its module Role.INNER if it lies between COLUMN and ROW, "
                "else Role.NORM; or set sequence_parallel"
            )


#: torch's modules that draw a mask, each with its probability ``p``.
DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def refuse_dropout(part: nn.Module) -> None:
    """Reject dropout: ranks draw other masks of the same hidden states, and replicated weights drift apart.

    With sequence parallelism each rank draws for tokens of its own, and gradients are summed.
    """
    for name, module in part.named_modules():
        if isinstance(module, DROPOUT) and module.p > 0:
            raise NanotrainError(
                f"{name}: {type(module).__name__} with p = {module.p:g} draws another mask on each tensor-"
                "parallel rank, where all of them have the same tokens: weights that they replicate would "
                "drift apart. Expected p = 0, or tp's sequence_parallel = true"
            )


def refuse_heads_with_more(part: nn.Module) -> None:
    """Reject a HEAD with other tensors than its weight: :class:`~nanotrain_tp.regions.Head` drops them."""
    for name, module, tag in tagged(part):
        tensors = (*module.named_parameters(), *module.named_buffers())
        more = [key for key, _ in tensors if key != "weight"] if tag.role is Role.HEAD else []
        if more:
            raise NanotrainError(
                f"{name}.{more[0]}: tp computes a HEAD's loss itself, as the cross-entropy of x @ weight.T, "
                "which leaves that out. Tag the projection Role.REPLICATED, compute the loss in the model's "
                "part, and set tp's sequence_parallel = false: every rank then computes all logits"
            )


def refuse_linears_with_more(part: nn.Module) -> None:
    """Reject a COLUMN or ROW whose class has its own forward: it would see a rank's outputs or partial sums.

    Those of a ROW are without the bias, which is added to their sum.
    """
    for name, module, tag in tagged(part):
        linear = tag.role in (Role.COLUMN, Role.ROW) and isinstance(module, nn.Linear)
        if linear and type(module).forward is not nn.Linear.forward:
            raise NanotrainError(
                f"{name}: {type(module).__name__} has a forward of its own, and tp splits a {tag.role.name} "
                "as x @ weight.T + bias and nothing else: expected nn.Linear, with what else is computed in "
                "the module around it"
            )


def is_copied(module: nn.Module, tag: Tag, degree: int) -> bool:
    """Return whether a COLUMN is grouped and ``degree`` does not divide its units."""
    if not tag.grouped or tag.role is not Role.COLUMN:
        return False
    units, rest = divmod(len(module.get_parameter("weight")), tag.unit)
    return not rest and units % degree != 0


def copy(name: str, module: nn.Module, tag: Tag, placements: Placements, ranks: Ranks) -> None:
    """Replicate a COLUMN on every rank, which uses some units of its output: gradients are partial."""
    for key, _ in module.named_parameters():
        placements[f"{name}.{key}"] = placements[f"{name}.{key}"].sum_over("tp")
    used = used_units(len(module.get_parameter("weight")) // tag.unit, ranks.index, ranks.size)
    module.register_forward_hook(lambda module, args, output: select(output, used, tag.unit))


def used_units(units: int, index: int, count: int) -> list[int]:
    """Return the units that the ``index``-th of ``count`` ranks uses: each is repeated until they divide.

    Their users, such as query heads, divide by both ``count`` and ``units``: each copy serves the same
    number.

    >>> [used_units(3, index, 2) for index in range(2)], [used_units(2, index, 4) for index in range(4)]
    ([[0, 0, 1], [1, 2, 2]], [[0], [0], [1], [1]])
    """
    repeated = lcm(units, count)
    share = repeated // count
    return [copied * units // repeated for copied in range(index * share, (index + 1) * share)]


def select(output: torch.Tensor, used: list[int], unit: int) -> torch.Tensor:
    """Return the ``used`` units of ``output`` [..., units * unit]; gradients of copies are summed."""
    if len(used) == 1:
        return output.narrow(-1, used[0] * unit, unit)
    units = output.split(unit, dim=-1)  # type: ignore[no-untyped-call]
    return torch.cat([units[number] for number in used], dim=-1)


def split(name: str, module: nn.Module, tag: Tag, placements: Placements, ranks: Ranks) -> None:
    """Replace a module's parameters, on ``meta``, by this rank's blocks of them.

    Raises:
        SplitError: the units do not divide.
    """
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    axes = {key: 0 for key, _ in own} if tag.role is Role.PER_HEAD else AXES.get(tag.role, {})
    for key, axis in axes.items():
        old = getattr(module, key, None)
        if old is None:
            continue
        placement = placements[f"{name}.{key}"]
        if "tp" not in placement.sharded:  # a tied table is sharded once, with the first part that has it
            _check_units(f"{name}.{key}", placement.shape[axis], tag, ranks.size)
            uneven = tag.role in VOCABULARY
            placement = placement.split(axis, "tp", ranks.index, ranks.size, uneven=uneven)
            placements[f"{name}.{key}"] = placement
        block = torch.empty(placement.shape, dtype=old.dtype, device=old.device)
        parameter = isinstance(old, nn.Parameter)
        setattr(module, key, nn.Parameter(block, requires_grad=old.requires_grad) if parameter else block)


def _check_units(name: str, length: int, tag: Tag, degree: int) -> None:
    units, rest = divmod(length, tag.unit)
    if rest:
        raise SplitError(
            f"{name} has {length} {tag.role.name} entries, which are no whole units of {tag.unit}"
        )
    if units % degree == 0 or (tag.role in VOCABULARY and units >= degree):
        return
    sizes = [n * tag.unit for n in multiples_near(units, degree)]
    of = f" = {units} units of {tag.unit}" if tag.unit > 1 else ""
    degrees = join_with_or(divisors_near(units, degree))
    raise SplitError(
        f"{name} has {length}{of} to split, which do not divide by tp = {degree}; nearest tp that divides: "
        f"{degrees}; nearest sizes for tp = {degree}: {join_with_or(sizes)}"
    )


def table_of(name: str, module: nn.Module, part: nn.Module, placements: Placements) -> Placement:
    """Return the placement of a module's table, which may be the embedding's of its part if tied."""
    if getattr(module, "weight", None) is not None:
        return placements[f"{name}.weight"]
    lenders = [other for other, _, tag in tagged(part) if tag.role is Role.VOCAB]
    if len(lenders) != 1:
        raise NanotrainError(
            f"{name} has no weight of its own, and its part has {len(lenders)} modules of role VOCAB that "
            "could lend it one; expected 1"
        )
    return placements[f"{lenders[0]}.weight"]


def hook_vocabulary(module: nn.Module, tag: Tag, region: ShardedRegion, rows: Rows) -> None:
    """Install the collectives of VOCAB or HEAD."""
    if tag.role is Role.HEAD:
        override_forward(module, Head(region, rows).forward)
        return
    table = Vocabulary(region, rows)
    module.register_forward_pre_hook(table.before)
    module.register_forward_hook(table.after)


def hook(module: nn.Module, tag: Tag, region: ShardedRegion) -> None:
    """Install the collectives of a role."""
    match tag.role:
        case Role.COLUMN:
            module.register_forward_pre_hook(region.enter_linear)
        case Role.SHARED:
            module.register_forward_pre_hook(region.enter_first)
        case Role.ROW if getattr(module, "bias", None) is not None:
            row = BiasedRow(region)
            module.register_forward_pre_hook(row.before)
            module.register_forward_hook(row.after, always_call=True)
        case Role.ROW:
            module.register_forward_hook(region.leave_last)
        case Role.POSITION if region.sequence_parallel:
            # For vectors [S, D] or [B, S, D]; without a conjugate, since the gradient is summed over ranks.
            module.register_forward_hook(
                lambda module, args, output: region.ranks.own(output, output.dim() - 2)
            )
        # First, so that what earlier wrappers' hooks do to inputs is done to the tokens that the module gets:
        # gradients of parameters that they read are complete at routers and partial at experts.
        case Role.ROUTER:
            experts = Experts(region)
            module.register_forward_pre_hook(experts.before_router, prepend=True)
            module.register_forward_hook(experts.after_router)
        case Role.EXPERTS:
            share_tokens(module, "tp")
            experts = Experts(region)
            module.register_forward_pre_hook(experts.before_experts, prepend=True)
            module.register_forward_hook(experts.after_experts)
        case Role.BLOCK:
            module.register_forward_hook(region.forget)
