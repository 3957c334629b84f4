"""Orthogonalizes matrices by a Newton-Schulz iteration, a stack of equal shape in one batched product.

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
kellerjordan.github.io/posts/muon, with its coefficients; Liu et al., "Muon is Scalable for LLM Training",
arXiv 2502.16982, equation 4, for the scale ``moonlight``.
"""

from __future__ import annotations

from math import sqrt

import torch

#: Of the polynomial a X + b (X X^T) X + c (X X^T)^2 X, chosen for its slope at 0: singular values come within
#: about 0.7 to 1.2 of 1 and do not converge.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

#: The smallest Frobenius norm that a matrix is divided by: one of zeros stays zero.
EPS = 1e-7


def orthogonalize(stack: torch.Tensor, steps: int) -> torch.Tensor:
    """Return about U V^T of each matrix U S V^T.

    Args:
        stack: [B, m, n], m at most n: a taller matrix costs more than its transpose. It is overwritten.
        steps: of the iteration.
    """
    a, b, c = COEFFICIENTS
    wide = torch.promote_types(stack.dtype, torch.float32)
    norms = torch.linalg.vector_norm(stack, dim=(-2, -1), keepdim=True, dtype=wide)
    x = stack.div_(norms.clamp_(min=EPS))
    for _ in range(steps):
        square = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


def flops(rows: int, columns: int) -> int:
    """Return FLOPs of a step of the iteration for one matrix."""
    m, n = sorted((rows, columns))
    return 4 * m * m * n + 2 * m**3


def scale_of(kind: str, rows: int, columns: int) -> float:
    """Return the factor of a matrix's update, by the config's ``scale``."""
    if kind == "original":
        return sqrt(max(1.0, rows / columns))
    return 0.2 * sqrt(max(rows, columns))
