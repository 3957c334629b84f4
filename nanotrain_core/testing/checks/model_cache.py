"""A model that continues from a cache computes the same as with the whole text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from nanotrain_core.batch import Batch
from nanotrain_core.contracts import caches_context
from nanotrain_core.models.cache import Cache
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.model import batch_of, model_of, parts_of
from nanotrain_core.testing.compare import assert_same


def logits(parts: Sequence[nn.Module], batch: Batch) -> torch.Tensor:
    """Return logits [B, S, V] of all parts in evaluation mode."""
    value = batch.tokens
    for part in parts:
        value = part.eval()(value, batch).value
    return value


def pieces(length: int) -> Iterator[int]:
    """Yield how many tokens each pass has: several, several more, then one at a time."""
    yield (several := max(1, length // 3))
    yield several
    yield from (1 for _ in range(length - 2 * several))


@check("model", since="0.1")
@torch.no_grad()
def goes_on_from_its_cache(case: Case) -> None:
    """If it says ``caches``, passes of a few tokens have the whole text's logits to 1e-9, also in parts."""
    model, tokens = model_of(case), batch_of(case).tokens
    if not caches_context(model):
        return
    expected = logits(parts_of(case), Batch(tokens))
    for cut in ((), (model.layers // 2,))[: model.layers]:
        parts, cache, found = parts_of(case, *cut), Cache(tokens.shape[1]), []
        for count in pieces(tokens.shape[1]):
            new = tokens[:, cache.start : cache.start + count]
            found.append(logits(parts, Batch(new, cache=cache)))
            cache.advance(count)
        where = f"logits of parts cut before layer {cut[0]}" if cut else "logits"
        assert_same({"cached": torch.cat(found, dim=1)}, {"cached": expected}, where, atol=1e-9)
