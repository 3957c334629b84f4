"""Output projection and cross-entropy with the vocabulary sharded over ranks; logits are never gathered.

Each rank computes the logits of its own tokens of the vocabulary, a chunk of rows at a time. For each row
ranks communicate only its largest logit, the sum of exponentials relative to that, and the target's logit
from the rank that has it: three values, in one all-gather for each chunk. As on one process, both gradients
are computed while a chunk's logits exist.

Shard sizes of the vocabulary may differ by one.

Shapes: T tokens, D width, V this rank's shard of the vocabulary.

Source: the vocabulary-parallel loss of Shoeybi et al., arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from functools import partial

import attrs
import torch
import torch.nn.functional as F

from nanotrain_core.api.torch import IGNORE, TORCH_OPS, Ops, Placement, SplitVocabulary, shard_range
from nanotrain_tp.collectives import Ranks


@attrs.define(frozen=True)
class Rows:
    """The range of vocabulary tokens whose rows this rank holds."""

    first: int
    vocabulary: int
    """Vocabulary size over all ranks."""

    @classmethod
    def of(cls, placement: Placement) -> Rows:
        """Return the rows of a sharded table."""
        return cls(placement.offset[0], placement.global_shape[0])

    def most(self, ranks: Ranks) -> int:
        """Return the maximum number of rows on any rank."""
        return -(-self.vocabulary // ranks.size)

    def pad(self, logits: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Return ``logits`` [..., V] padded to the columns of the rank with the most."""
        return F.pad(logits, (0, self.most(ranks) - logits.shape[-1]))

    def join(self, padded: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Return all ranks' padded logits concatenated, as those of the whole vocabulary."""
        most = self.most(ranks)
        shares = [shard_range(self.vocabulary, index, ranks.size) for index in range(ranks.size)]
        kept = [padded.narrow(-1, most * index, end - begin) for index, (begin, end) in enumerate(shares)]
        return torch.cat(kept, dim=-1)


def split_cross_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    rows: Rows,
    ranks: Ranks,
    ops: Ops = TORCH_OPS,
) -> torch.Tensor:
    """Return the summed cross-entropy of whole tokens, in nats: bitwise equal on every rank.

    The gradient of ``hidden_TD`` is partial: the contribution of this rank's tokens of the vocabulary.
    Targets of :data:`~nanotrain_core.batch.IGNORE` are not counted. The sum is float32, or float64 for
    float64 inputs.

    Raises:
        IndexError: a target is outside the whole vocabulary.
    """
    wrong = ((target_T < 0) & (target_T != IGNORE)) | (target_T >= rows.vocabulary)
    if torch.compiler.is_compiling() or wrong.device.type != "cpu":  # no host synchronization to find out
        torch._assert_async(~wrong.any(), f"a target is not in the vocabulary of {rows.vocabulary}")
    elif wrong.any():
        raise IndexError(f"target {int(target_T[wrong][0])} is not in the vocabulary of {rows.vocabulary}")
    split = SplitVocabulary(rows.first, rows.most(ranks), partial(ranks.all_gather, dim=0))
    return ops.linear_cross_entropy(hidden_TD, weight_VD, target_T, split)
