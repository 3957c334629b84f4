"""Cuts the layers of a model into pipeline stages of equal time, or as the recipe says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from nanotrain_core.actions import Part, parts_between
from nanotrain_pp_1f1b import InterleavedConfig, PipelineConfig


def split(config: PipelineConfig, layers: int, ranks: Sequence[int]) -> tuple[Part, ...]:
    """Return the stages of a model with ``layers`` layers; ``ranks``: the pipeline rank of each.

    Raises:
        ValueError: the config's list does not fit, or there are fewer layers than stages.
    """
    if config.layers is not None:
        check_list(config.layers, layers, ranks)
        return parts_between([0, *accumulate(config.layers)], ranks)
    if layers < len(ranks):
        raise ValueError(too_few(layers, ranks, v_can_change=isinstance(config, InterleavedConfig)))
    sizes = balance(layers, ranks, config.embedding_cost, config.head_cost)
    return parts_between([0, *accumulate(sizes)], ranks)


def check_list(sizes: Sequence[int], layers: int, ranks: Sequence[int]) -> None:
    """Check a list of layers per stage.

    Raises:
        ValueError: it has another number of stages, or of layers, or leaves a rank without anything.
    """
    stages = f"{len(ranks)} stages ({per_rank(ranks)})"
    if len(sizes) != len(ranks):
        raise ValueError(f"layers = {list(sizes)} names {len(sizes)} stages; expected {stages}")
    if sum(sizes) != layers:
        near = "" if (last := sizes[-1] + layers - sum(sizes)) < 0 else f"; {[*sizes[:-1], last]} would do"
        text = f"layers = {list(sizes)} adds up to {sum(sizes)}; expected {layers}, the model's layers{near}"
        raise ValueError(text)
    held = {ranks[0], ranks[-1], *(rank for rank, size in zip(ranks, sizes, strict=True) if size)}
    for rank in sorted(set(ranks) - held):
        raise ValueError(
            f"layers = {list(sizes)} leaves nothing to rank {rank}: give it a layer, or lower pp"
        )


def balance(layers: int, ranks: Sequence[int], embedding_cost: float, head_cost: float) -> list[int]:
    """Return layers per stage, at least one each, such that the slowest stage is as fast as can be.

    Each layer in turn goes to the stage that is then the fastest. Of equally fast ones it is that whose rank
    has least to do; then a later one, since the first stages hold most activations; the last one last.

    Args:
        layers: of the whole model, no fewer than stages.
        ranks: the pipeline rank of each stage.
        embedding_cost: time of the embedding, in layers.
        head_cost: time of head and loss, in layers.

    >>> balance(10, [0, 1, 2, 3], 0.0, 1.5)
    [3, 3, 3, 1]
    """
    final = len(ranks) - 1
    sizes = [1] * len(ranks)
    costs = [1.0] * len(ranks)
    costs[0] += embedding_cost
    costs[final] += head_cost
    loads = [0.0] * (max(ranks) + 1)
    for rank, cost in zip(ranks, costs, strict=True):
        loads[rank] += cost
    for _ in range(layers - len(ranks)):
        stage = min(range(len(ranks)), key=lambda s: (costs[s], loads[ranks[s]], s == final, -s))
        sizes[stage] += 1
        costs[stage] += 1
        loads[ranks[stage]] += 1
    return sizes


def too_few(layers: int, ranks: Sequence[int], *, v_can_change: bool) -> str:
    """Say that there are not enough layers, and what would do."""
    pp = len(set(ranks))
    each = len(ranks) // pp
    largest = {"pp": layers // each, "v": layers // pp if v_can_change else 0}
    remedies = [f"at most {name} = {value}" for name, value in largest.items() if value]
    remedies.append("list [schedule] layers, where a stage may have 0")
    return f"{layers} layers cannot fill {len(ranks)} stages ({per_rank(ranks)}): {', or '.join(remedies)}"


def per_rank(ranks: Sequence[int]) -> str:
    """Say how the number of stages comes about."""
    pp = len(set(ranks))
    return f"pp {pp}" if pp == len(ranks) else f"pp {pp} x {len(ranks) // pp} on each rank"
