"""Inputs of the functions of :class:`~nanotrain_core.models.ops.Ops` for the checks of kernels.

Shapes: see :mod:`nanotrain_core.models.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import torch

from nanotrain_core.batch import IGNORE
from nanotrain_core.models.cross_entropy import Chunks, SplitVocabulary, linear_cross_entropy
from nanotrain_core.models.rope import rope_frequencies, rope_rotation
from nanotrain_core.moe.routing import invert_permutation, sort_by_expert

Tensors = Mapping[str, torch.Tensor]
Function = Callable[..., torch.Tensor]


def _in_order(function: Function, leaves: Tensors, **more: Any) -> torch.Tensor:
    return function(*leaves.values(), **more)


@attrs.define(frozen=True, eq=False)
class Sample:
    """One call of one function."""

    name: str
    leaves: Tensors
    """Contiguous tensors that arguments are made of. Gradients are taken of those of floating point."""
    call: Callable[[Function, Tensors], torch.Tensor] = _in_order
    """Calls the function with arguments made of the leaves, some of them views that are not contiguous."""

    def cast(self, dtype: torch.dtype) -> Sample:
        """Return it with floating-point leaves in ``dtype``."""
        leaves = {name: x.to(dtype) if x.is_floating_point() else x for name, x in self.leaves.items()}
        return attrs.evolve(self, leaves=leaves)


def samples(function: str) -> list[Sample]:
    """Return samples with values that are exact in bfloat16, and so in each dtype, an ordinary one first."""
    torch.manual_seed(0)
    return [sample.cast(torch.bfloat16) for sample in _SAMPLES[function]()]


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


# --- attention and rope ----------------------------------------------------------------------------


def _heads(name: str, sizes: tuple[int, int, int, int, int, int], scale: float | None = None) -> Sample:
    B, S, H, G, K, V = sizes
    leaves = {"q": _normal(B, S, H, K), "k": _normal(B, S, G, K), "v": _normal(B, S, G, V)}
    return Sample(name, leaves, partial(_in_order, scale=scale) if scale else _in_order)


def _after_others(name: str, sample: Sample, queries: int) -> Sample:
    """Return the sample with only this many of the last queries: a cache has the keys of earlier ones."""
    leaves = {**sample.leaves, "q": sample.leaves["q"][:, -queries:].clone()}
    return Sample(name, leaves, sample.call)


def _attention() -> Iterator[Sample]:
    yield _heads("ordinary", (2, 16, 4, 4, 8, 8))
    yield _heads("one head, odd sizes", (1, 7, 1, 1, 5, 5))
    yield _heads("3 query heads for each of 2 others", (2, 13, 6, 2, 8, 8))
    yield _heads("5 query heads for one", (1, 11, 5, 1, 4, 4))
    yield _heads("keys wider than values, and a scale", (2, 9, 3, 3, 12, 7), 0.3)
    yield _heads("one token", (3, 1, 2, 1, 4, 4))
    yield _heads("no sequences", (0, 5, 2, 2, 4, 4))
    yield _heads("a long sequence", (1, 1031, 2, 1, 4, 4))
    yield _after_others("one token after 6 others", _heads("", (2, 7, 6, 2, 4, 5)), 1)
    yield _after_others("3 tokens after 6 others", _heads("", (2, 9, 4, 2, 4, 5)), 3)

    def documents(function: Function, leaves: Tensors) -> torch.Tensor:
        return function(leaves["q"], leaves["k"], leaves["v"], 0.4, leaves["document_starts"])

    begins = torch.tensor([[0, 0, 2, 3, 3, 3, 3], [0, 0, 0, 0, 0, 0, 6]])
    leaves = {"q": _normal(2, 7, 4, 8), "k": _normal(2, 7, 2, 8), "v": _normal(2, 7, 2, 5)}
    alone = Sample("documents that do not see one another", {**leaves, "document_starts": begins}, documents)
    yield alone
    yield _after_others("3 tokens of documents after 4 others", alone, 3)

    def windows(function: Function, leaves: Tensors, size: int = 3) -> torch.Tensor:
        return function(leaves["q"], leaves["k"], leaves["v"], 0.4, leaves.get("document_starts"), size)

    window = Sample("a window of 3 tokens", _heads("", (2, 13, 4, 2, 8, 5)).leaves, windows)
    yield window
    yield Sample("a window longer than the sequence", window.leaves, partial(windows, size=20))
    yield Sample("a window in a long sequence", _heads("", (1, 150, 2, 1, 4, 4)).leaves, windows)
    yield _after_others("a window of one token after 12 others", window, 1)
    yield _after_others("a window of 5 tokens after 8 others", window, 5)
    yield Sample("a window in documents", alone.leaves, windows)

    def views(function: Function, leaves: Tensors) -> torch.Tensor:
        q, k = leaves["q"].transpose(1, 2), leaves["k"].unsqueeze(2).expand(-1, -1, 4, -1)
        return function(q, k, leaves["v"][..., 1:])

    leaves = {"q": _normal(2, 4, 6, 8), "k": _normal(2, 6, 8), "v": _normal(2, 6, 4, 6)}
    yield Sample("transposed, expanded and sliced", leaves, views)


def _rope() -> Iterator[Sample]:
    def turn(
        function: Function, leaves: Tensors, magnitude: float = 1.0, view: Any = slice(None)
    ) -> torch.Tensor:
        x = leaves["x"][..., view]
        turning = rope_frequencies(x.shape[-1], 100.0, device=x.device)
        return function(x, *rope_rotation(x.shape[1], turning, like=x, magnitude=magnitude))

    yield Sample("ordinary", {"x": _normal(2, 16, 4, 8)}, turn)
    yield Sample("one head, 3 pairs", {"x": _normal(1, 7, 1, 6)}, turn)
    yield Sample("one token", {"x": _normal(2, 1, 3, 4)}, turn)
    yield Sample("no sequences", {"x": _normal(0, 5, 3, 4)}, turn)
    yield Sample("another magnitude", {"x": _normal(2, 5, 3, 4)}, partial(turn, magnitude=1.3))
    yield Sample("a part of each head", {"x": _normal(2, 5, 3, 10)}, partial(turn, view=slice(3, 9)))


# --- element-wise ----------------------------------------------------------------------------------


def _rms_norm() -> Iterator[Sample]:
    def norm(function: Function, leaves: Tensors, eps: float = 1e-5) -> torch.Tensor:
        return function(leaves["x"], leaves["weight"], eps)

    def views(function: Function, leaves: Tensors) -> torch.Tensor:
        return function(leaves["x"].transpose(0, 1), leaves["weight"][::2], 1e-5)

    for name, shape in {
        "ordinary": (2, 16, 32),
        "odd sizes": (3, 7, 13),
        "each head": (2, 5, 3, 8),
        "one row": (1, 31),
        "width 1": (4, 1),
        "no rows": (0, 8),
    }.items():
        yield Sample(name, {"x": _normal(*shape), "weight": _normal(shape[-1])}, norm)
    small = {"x": 0.1 * _normal(5, 16), "weight": _normal(16)}
    yield Sample("a large eps", small, partial(norm, eps=0.5))
    yield Sample("transposed", {"x": _normal(3, 5, 8), "weight": _normal(16)}, views)

    def expanded(function: Function, leaves: Tensors) -> torch.Tensor:
        return function(leaves["x"].expand(4, -1, -1), leaves["weight"], 1e-5)

    yield Sample("expanded", {"x": _normal(1, 5, 8), "weight": _normal(8)}, expanded)


def _swiglu() -> Iterator[Sample]:
    def halves(function: Function, leaves: Tensors) -> torch.Tensor:
        return function(*leaves["both"].chunk(2, dim=-1))

    def expanded(function: Function, leaves: Tensors) -> torch.Tensor:
        return function(leaves["gate"].T, leaves["up"].expand(5, -1))

    for name, shape in {
        "ordinary": (2, 16, 32),
        "odd sizes": (3, 7, 13),
        "one number": (1, 1),
        "no rows": (0, 8),
    }.items():
        yield Sample(name, {"gate": _normal(*shape), "up": _normal(*shape)})
    yield Sample("large gates", {"gate": 50 * _normal(4, 8), "up": _normal(4, 8)})
    yield Sample("halves of one tensor", {"both": _normal(2, 3, 14)}, halves)
    yield Sample("transposed and expanded", {"gate": _normal(7, 5), "up": _normal(1, 7)}, expanded)


# --- the head --------------------------------------------------------------------------------------


def _linear_cross_entropy() -> Iterator[Sample]:
    def leaves(tokens: int, width: int, vocab: int, ignored: int = 0) -> Tensors:
        target = torch.randint(vocab, (tokens,))
        target[:ignored] = IGNORE
        return {"hidden": _normal(tokens, width), "weight": _normal(vocab, width), "target": target}

    def views(function: Function, leaves: Tensors) -> torch.Tensor:
        return function(leaves["hidden"].T, leaves["weight"].T, leaves["target"][::2])

    yield Sample("ordinary", leaves(24, 16, 32))
    yield Sample("odd sizes", leaves(13, 7, 29))
    yield Sample("some ignored", leaves(12, 8, 16, ignored=5))
    yield Sample("all ignored", leaves(6, 8, 16, ignored=6))
    yield Sample("one token", leaves(1, 8, 16))
    yield Sample("no tokens", leaves(0, 8, 16))
    yield Sample("a vocabulary of one", leaves(3, 4, 1))
    turned = {"hidden": _normal(6, 9), "weight": _normal(6, 11), "target": torch.randint(11, (18,))}
    yield Sample("transposed", turned, views)
    split = SplitVocabulary(0, 40, lambda own_1C3: own_1C3)
    chunks: dict[str, Any] = {"split": split, "chunks": Chunks(logits=100, tokens=3)}
    yield Sample("in chunks, as ranks ask for it", leaves(20, 8, 16, 3), partial(_in_order, **chunks))
    yield Sample("the second of two ranks", leaves(13, 8, 20, 3), partial(_of_two_ranks, rank=1))
    chunks = {"chunks": Chunks(logits=36, tokens=3)}
    yield Sample(
        "the first of two, in chunks", leaves(20, 8, 20, 3), partial(_of_two_ranks, rank=0, **chunks)
    )


def _of_two_ranks(function: Function, leaves: Tensors, rank: int, **more: Any) -> torch.Tensor:
    """Call the loss as one of two tensor-parallel ranks does; the other one's numbers are plain PyTorch's."""
    hidden, weight, target = leaves["hidden"], leaves["weight"], leaves["target"]
    most = len(weight) * 3 // 5
    firsts, shards = (0, most), (weight[:most], weight[most:])
    theirs: list[torch.Tensor] = []

    def listen(own_1T3: torch.Tensor) -> torch.Tensor:
        theirs.append(own_1T3)
        return own_1T3

    place = 0

    def gather(own_1C3: torch.Tensor) -> torch.Tensor:
        # Chunks are in order, and of a size of the function's own, which it may pad.
        nonlocal place
        rows = torch.arange(place, place + own_1C3.shape[1]) % len(target)
        place += own_1C3.shape[1]
        each = [own_1C3.detach(), theirs[0][:, rows].to(own_1C3.dtype)]  # a collective is not differentiable
        return torch.cat(each if rank == 0 else each[::-1])

    with torch.no_grad():
        split = SplitVocabulary(firsts[1 - rank], most, listen)
        linear_cross_entropy(hidden.detach(), shards[1 - rank].detach(), target, split)
    return function(hidden, shards[rank], target, SplitVocabulary(firsts[rank], most, gather), **more)


# --- mixture of experts ----------------------------------------------------------------------------


def _experts() -> Iterator[Sample]:
    def leaves(counts: list[int], width: int, inner: int) -> Tensors:
        weights = {name: _normal(len(counts), inner, width) for name in ("gate", "up")}
        rows, many = _normal(sum(counts), width), torch.tensor(counts)
        return {"rows": rows, "counts": many, **weights, "down": _normal(len(counts), width, inner)}

    def views(function: Function, leaves: Tensors) -> torch.Tensor:
        gate, up = leaves["both"].chunk(2, dim=1)
        return function(leaves["rows"].T, leaves["counts"], gate, up, leaves["down"].mT)

    yield Sample("ordinary", leaves([5, 3, 8, 4], 16, 8))
    yield Sample("odd sizes", leaves([3, 1, 7], 5, 11))
    yield Sample("experts without rows", leaves([0, 5, 0, 2, 0], 8, 4))
    yield Sample("all rows with the last", leaves([0, 0, 7], 8, 4))
    yield Sample("one expert", leaves([6], 8, 4))
    yield Sample("no rows", leaves([0, 0, 0], 8, 4))
    turned = {"rows": _normal(8, 7), "counts": torch.tensor([4, 3]), "both": _normal(2, 10, 8)}
    yield Sample("transposed and sliced", {**turned, "down": _normal(2, 5, 8)}, views)


def _order(tokens: int, chosen: int, experts: int = 8) -> Tensors:
    picked = torch.rand(tokens, experts).topk(chosen, dim=-1).indices
    order, _ = sort_by_expert(picked, experts)
    return {"order": order, "back": invert_permutation(order)}


def _permute() -> Iterator[Sample]:
    def call(function: Function, leaves: Tensors) -> torch.Tensor:
        chosen = len(leaves["order"]) // max(1, len(leaves["x"]))
        return function(leaves["x"], leaves["order"], leaves["back"], chosen or 2)

    def turned(function: Function, leaves: Tensors) -> torch.Tensor:
        return function(leaves["x"].T, leaves["order"], leaves["back"], 2)

    for name, (tokens, width, chosen) in _TOKENS.items():
        yield Sample(name, {"x": _normal(tokens, width), **_order(tokens, chosen)}, call)
    yield Sample("transposed", {"x": _normal(5, 6), **_order(6, 2)}, turned)


def _unpermute() -> Iterator[Sample]:
    def call(function: Function, leaves: Tensors) -> torch.Tensor:
        return function(leaves["outputs"], leaves["order"], leaves["back"], leaves["weights"])

    def turned(function: Function, leaves: Tensors) -> torch.Tensor:
        return function(leaves["outputs"].T, leaves["order"], leaves["back"], leaves["weights"].T)

    def wide(function: Function, leaves: Tensors) -> torch.Tensor:
        weights = leaves["weights"]
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        return function(leaves["outputs"], leaves["order"], leaves["back"], weights)

    def leaves(tokens: int, width: int, chosen: int) -> dict[str, torch.Tensor]:
        own = {"outputs": _normal(tokens * chosen, width), "weights": _normal(tokens, chosen)}
        return {**own, **_order(tokens, chosen)}

    for name, sizes in _TOKENS.items():
        yield Sample(name, leaves(*sizes), call)
    yield Sample("weights in float32 at least", leaves(6, 8, 2), wide)
    flat = leaves(6, 5, 2)
    yield Sample("transposed", {**flat, "outputs": _normal(5, 12), "weights": _normal(2, 6)}, turned)


#: Tokens, width, and experts chosen for each.
_TOKENS = {
    "ordinary": (12, 8, 2),
    "odd sizes": (7, 5, 3),
    "one expert each": (5, 4, 1),
    "all experts": (3, 4, 8),
    "one token": (1, 4, 2),
    "no tokens": (0, 4, 2),
}

_SAMPLES: Mapping[str, Callable[[], Iterator[Sample]]] = {
    "attention": _attention,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "linear_cross_entropy": _linear_cross_entropy,
    "experts": _experts,
    "permute": _permute,
    "unpermute": _unpermute,
}
