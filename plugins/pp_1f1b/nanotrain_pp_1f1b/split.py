"""Splits the layers of a model into pipeline stages of equal time, or as given by the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import attrs

from nanotrain_core.api import Costs, Part, parts_between
from nanotrain_pp_1f1b import InterleavedConfig, PipelineConfig
from nanotrain_pp_1f1b.balance import balance


def split(config: PipelineConfig, costs: Costs, ranks: Sequence[int]) -> tuple[Part, ...]:
    """Return the stages of a model whose pieces cost ``costs``; ``ranks``: the pipeline rank of each.

    Raises:
        ValueError: the config's list does not fit, or there are fewer layers than stages.
    """
    layers = len(costs.layers)
    if config.layers is not None:
        check_list(config.layers, layers, ranks)
        return parts_between([0, *accumulate(config.layers)], ranks)
    if layers < len(ranks):
        raise ValueError(too_few(layers, ranks, v_can_change=isinstance(config, InterleavedConfig)))
    return parts_between([0, *accumulate(balance(in_effect(config, costs), ranks))], ranks)


def in_effect(config: PipelineConfig, costs: Costs) -> Costs:
    """Return the model's costs, with embedding and head costs from the config if set."""
    mean = sum(costs.layers) / len(costs.layers)
    if config.embedding_cost is not None:
        costs = attrs.evolve(costs, embedding=config.embedding_cost * mean)
    if config.head_cost is not None:
        costs = attrs.evolve(costs, head=config.head_cost * mean)
    return costs


def check_list(sizes: Sequence[int], layers: int, ranks: Sequence[int]) -> None:
    """Check a list of layers per stage.

    Raises:
        ValueError: it has another number of stages, or of layers, or leaves a rank empty.
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


def too_few(layers: int, ranks: Sequence[int], *, v_can_change: bool) -> str:
    """Return an error: not enough layers, and what would be enough."""
    pp = len(set(ranks))
    each = len(ranks) // pp
    largest = {"pp": layers // each, "v": layers // pp if v_can_change else 0}
    remedies = [f"at most {name} = {value}" for name, value in largest.items() if value]
    remedies.append("list [schedule] layers, where a stage may have 0")
    return f"{layers} layers cannot fill {len(ranks)} stages ({per_rank(ranks)}): {', or '.join(remedies)}"


def per_rank(ranks: Sequence[int]) -> str:
    """Return how the number of stages is computed, as text."""
    pp = len(set(ranks))
    return f"pp {pp}" if pp == len(ranks) else f"pp {pp} x {len(ranks) // pp} on each rank"
