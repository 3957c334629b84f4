"""The ``probes`` monitor: the model's predictions on one fixed batch, repeated during training.

The batch is the first of the validation data, or without such data random tokens with a seed of their own. A
second pass runs with the second half of every sequence but the last changed: the logits of a causal model for
the first half must not change.

Memory: the logits of both passes, 2 B S V in the model's dtype, plus transients of at most eight tensors of
:data:`ELEMENTS` numbers, or of one position's, and the kept [P, V], in float32 at least. With the defaults
(B = 2, S = 256) and a vocabulary of 129,280 in bfloat16 that is 0.27 + 0.27 + 0.03 GB. All sequences take one
pass: :func:`leak` compares rows that share a tensor's scale.

Shapes: B sequences, S tokens, V vocabulary, N = B S rows, P positions that are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import attrs
import torch
import torch.nn.functional as F

from nanotrain_core.api import NanotrainError, Recipe
from nanotrain_core.api.torch import IGNORE, Batch, Monitor, RunInfo, Shard, UpdateReport
from nanotrain_health import ProbesConfig

#: Positions of all sequences whose predictions are kept until the next probe.
KEPT = 64
#: Logits that are worked on at a time: 34 MB in float32.
ELEMENTS = 2**23


class Probes(Monitor):
    """Every rank computes the same logits, and publishes the same numbers."""

    reads_weights = False

    def __init__(self, config: ProbesConfig) -> None:
        self.config = config
        self.last: torch.Tensor | None = None
        """Logarithms of the probabilities [P, V] of the last probe."""
        self.hash = ""

    def on_start(self, run: RunInfo) -> None:
        """Choose the batch."""
        self.run, self.last = run, None
        batch = cut(fixed_batch(run, self.config.sequences), self.config.length)
        self.batch = batch.to(run.device)
        self.changed = changed(batch.tokens, run.data.vocab_size).to(run.device)
        self.hash = hashlib.sha256(batch.tokens.numpy().tobytes()).hexdigest()[:16]
        self.shifted = shifted(batch)
        self.untold = True

    def on_after_update(self, update: UpdateReport) -> None:
        """Probe the weights that the step has made."""
        if update.step % self.config.every:
            return
        metrics = self.run.metrics
        if self.untold:
            metrics.text("probes/batch", self.hash)
            self.untold = False
        if self.shifted is not None:
            metrics.scalar("probes/shifted", self.shifted)
        begins = self.batch.document_starts
        logits_BSV = self.run.logits(self.batch.tokens, begins)
        metrics.scalar("probes/leak", leak(logits_BSV, self.run.logits(self.changed, begins)))
        flat, targets = logits_BSV.flatten(0, 1), self.batch.targets
        for name, value in predictions(flat, None if targets is None else targets.flatten(), self.config.top):
            metrics.scalar(f"probes/{name}", value)
        self._drift(flat)

    def _drift(self, flat_NV: torch.Tensor) -> None:
        """Publish the KL divergence between the last probe and this one on some rows, and keep these rows."""
        before, size = self.last, rows_at_once(flat_NV)
        kept = flat_NV[:: -(-len(flat_NV) // KEPT)]
        self.last = kept.new_empty(kept.shape, dtype=wide(kept)) if before is None else before
        total = torch.zeros((), dtype=torch.float64, device=kept.device)
        for rows, old in zip(torch.split(kept, size), torch.split(self.last, size), strict=True):
            log_p = torch.log_softmax(rows.to(wide(rows)), -1)
            if before is not None:
                total += (log_p.exp() * (log_p - old)).sum(-1).double().sum()
            old.copy_(log_p)
        if before is not None:
            self.run.metrics.scalar("probes/kl", total / len(kept))


def predictions(
    flat_NV: torch.Tensor, targets_N: torch.Tensor | None, top: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, value): mean loss over known targets, mean entropy and mean top-k mass of all rows.

    Works on :data:`ELEMENTS` logits at a time.
    """
    size = rows_at_once(flat_NV)
    loss, entropy, mass = torch.zeros(3, dtype=torch.float64, device=flat_NV.device).unbind()
    for first in range(0, len(flat_NV), size):
        rows = flat_NV[first : first + size]
        log_p = torch.log_softmax(rows.to(wide(rows)), -1)
        if targets_N is not None:
            wanted = targets_N[first : first + size]
            loss += F.nll_loss(log_p, wanted, ignore_index=IGNORE, reduction="sum").double()
        p = log_p.exp()
        entropy -= (p * log_p).sum(-1).double().sum()
        mass += p.topk(min(top, p.shape[-1])).values.sum(-1).double().sum()
    if targets_N is not None:
        yield "loss", loss / (targets_N != IGNORE).sum()
    yield "entropy", entropy / len(flat_NV)
    yield "top_mass", mass / len(flat_NV)


def rows_at_once(flat_NV: torch.Tensor) -> int:
    """Return how many rows have :data:`ELEMENTS` logits; one at least."""
    return max(1, ELEMENTS // flat_NV.shape[-1])


def wide(x: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def cut(batch: Batch, length: int) -> Batch:
    """Return the first ``length`` tokens of all sequences, with their targets and documents."""

    def first(whole_BS: torch.Tensor | None) -> torch.Tensor | None:
        return None if whole_BS is None else whole_BS[:, :length].contiguous()

    tokens = batch.tokens[:, :length].contiguous()
    own = {name: tensor[:, :length].contiguous() for name, tensor in batch.per_token.items()}
    return attrs.evolve(
        batch,
        tokens=tokens,
        targets=first(batch.targets),
        document_starts=first(batch.document_starts),
        per_token=own,
    )


def fixed_batch(run: RunInfo, sequences: int) -> Batch:
    """Return the first held-out sequences; if the data hold out none, random tokens without targets.

    The same on every rank, and on every layout.

    Raises:
        NanotrainError: the run is a script, whose loader has no fixed batch.
    """
    if not isinstance(run.recipe, Recipe):
        raise NanotrainError(
            "the monitor probes needs the data of a recipe; a script's loader has no fixed batch"
        )
    found: Batch | None = run.data.validation_batch(0, sequences, Shard())
    if found is not None:
        return found
    generator = torch.Generator().manual_seed(0)
    return Batch(
        torch.randint(run.data.vocab_size, (sequences, run.recipe.batch.length), generator=generator)
    )


def changed(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return tokens [B, S] with all of the second half replaced by others, but for the last sequence."""
    changed, half = tokens.clone(), tokens.shape[1] // 2
    changed[:-1, half:] = (changed[:-1, half:] + 1) % vocabulary
    return changed


def leak(logits_BSV: torch.Tensor, others_BSV: torch.Tensor) -> torch.Tensor:
    """Return the norm of the change in the first half's logits, relative to their norm around the mean.

    Twice the change of the last sequence, none of whose tokens differ, is subtracted: with per-tensor
    scaling, as FP8 may use, the rounding of every row depends on all others. At least 0.
    """
    half, found = logits_BSV.shape[1] // 2, []
    rows = rows_at_once(logits_BSV)
    for one, other in zip(logits_BSV[:, :half], others_BSV[:, :half], strict=True):
        size, change = torch.zeros(2, dtype=torch.float64, device=one.device).unbind()
        for mine, changed in zip(torch.split(one, rows), torch.split(other, rows), strict=True):
            x = mine.to(wide(mine))
            change += (x - changed).square().sum(-1).double().sum()
            size += (x - x.mean(-1, keepdim=True)).square().sum(-1).double().sum()
        found.append(change.sqrt() / size.sqrt().clamp(min=1e-12))
    each = torch.stack(found)
    return torch.clamp(each[:-1].mean() - 2 * each[-1], min=0.0)


def shifted(batch: Batch) -> float | None:
    """Return the share of targets that are the next input, None where none can be compared."""
    if batch.targets is None:
        return None
    targets, after = batch.targets[:, :-1], batch.tokens[:, 1:]
    counted = targets != IGNORE
    count = int(counted.sum())
    return int(((targets == after) & counted).sum()) / count if count else None
