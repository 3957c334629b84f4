"""Scale groups of 8-bit moments, and layouts that would split them. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nanotrain_core.errors import Problem
from nanotrain_core.layout.roles import Role
from nanotrain_core.recipe.divisibility import divisibility_of

if TYPE_CHECKING:  # `nanotrain_core.builtin`, which imports this module, is not needed to run it
    from nanotrain_core.builtin.configs import AdamWConfig
    from nanotrain_core.layout.layout import Layout
    from nanotrain_core.recipe.tree import Recipe

#: Consecutive elements of a row that share a scale. :data:`~nanotrain_core.layout.placement.RANGE` is a
#: multiple.
GROUP = 32
#: The largest beta2 at which a rounded second moment still follows decreasing gradients. A step lowers it by
#: at most 1 - beta2 of its value. Rounding loses changes below 2^-9 of the value in bfloat16, and of about
#: 1/255 of the group's largest root in companded eight bits.
MOST_BETA2 = 0.99


def check_moments(recipe: Recipe, config: AdamWConfig, layout: Layout) -> Iterator[Problem]:
    """Yield a problem for moments that the chosen dtype cannot represent.

    These are second moments in low precision with a beta2 above :data:`MOST_BETA2`, and 8-bit moments whose
    scale groups the layout would split. The latter is checked here only if the model declares its rows;
    otherwise the ranks reject it. Vectors, and rows that are not a multiple of a group, keep float32 moments.
    """
    if config.moment_dtype == "float32":
        return
    if config.betas[1] > MOST_BETA2:
        yield Problem(
            "optimizer.betas",
            f"with moment_dtype = '{config.moment_dtype}' a step lowers the second moment by at most "
            f"1 - beta2 = {1 - config.betas[1]:g} of its value, which rounding can lose: it hardly "
            f"decreases, and updates become too small; expected beta2 of at most {MOST_BETA2}, or "
            "moment_dtype = 'float32'",
        )
    if config.moment_dtype != "int8":
        return
    for extent in divisibility_of(recipe.model.config) or ():
        dim = "etp" if Role.EXPERTS in extent.roles else "tp"
        degree = layout.degree(dim)
        row, units = extent.row, extent.units
        if row % GROUP or units % degree or row // degree % GROUP == 0:
            continue
        most = max(n for n in range(1, degree) if units % n == 0 and row % (n * GROUP) == 0)
        yield Problem(
            "optimizer.moment_dtype",
            f"with 'int8' {GROUP} neighbors in a row share a scale, but {units} {extent.what} make rows of "
            f"{row}, of which {dim} = {degree} leaves {row // degree} on a rank; expected {dim} of at most "
            f"{most}, or 'bfloat16'",
        )
