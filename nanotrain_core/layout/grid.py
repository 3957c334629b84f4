"""The topology ``grid``: pipeline x data x context x tensor, with experts folded over the same ranks."""

from __future__ import annotations

from math import lcm, prod

from nanotrain_core.builtin.configs import GridConfig
from nanotrain_core.layout.layout import Layout, View


class Grid:
    """Two row-major grids over the same ranks, the last dimension on neighboring ranks.

    The dense view (pp, dp, cp, tp) places attention and dense weights. The expert view
    (pp, edp, ep, etp) arranges the ranks of each pipeline stage a second time. The sizes of dp and edp
    follow from the configured degrees.

    With 8 ranks, pp 2 and cp 2 leave dp 2, tp 1: ranks 0 to 3 are stage 0, of which (0, 1) and (2, 3) are the
    two groups along cp (each has one half of the batch's rows, and each rank half of every row's tokens),
    and (0, 2) and (1, 3) those along dp. A gradient of stage 0 is summed over all four.

    ``dp_shard`` adds a view in which dp is two dimensions, (dp_replicate, dp_shard), so that the ranks with
    one copy of the weights between them are neighbors. Experts on several ranks have such a view, too.
    """

    def __init__(self, config: GridConfig) -> None:
        self._config = config

    def layout(self, world_size: int) -> Layout:
        """Return both views of ``world_size`` ranks.

        Ranks along cp see different tokens of the same rows, so gradients are partial over dp and
        cp, while the rows of a batch are split over dp alone, and each row's tokens over cp. Ranks of
        the expert view see different tokens along edp and ep, those of one etp group the same.

        Raises:
            ValueError: the degrees of a view do not divide ``world_size``, or a copy of the experts would
                not lie within one of the other weights.
        """
        c = self._config
        shard = {} if c.dp_shard is None else {"dp_shard": c.dp_shard}
        rest = self._rest(world_size, {"pp": c.pp, **shard, "cp": c.cp, "tp": c.tp})
        edp = self._rest(world_size, {"pp": c.pp, "ep": c.ep, "etp": c.etp})
        dp = rest * (c.dp_shard or 1)
        views = {"dense": View(("pp", "dp", "cp", "tp"), (c.pp, dp, c.cp, c.tp))}
        data_dims: tuple[str, ...] = ("dp", "cp", "edp", "ep")
        for name, degree in shard.items():
            dims = ("pp", "dp_replicate", name, "cp", "tp")
            views["dense_shard"] = View(dims, (c.pp, rest, degree, c.cp, c.tp))
            data_dims += dims[1:3]
        views["expert"] = View(("pp", "edp", "ep", "etp"), (c.pp, edp, c.ep, c.etp))
        if shard and c.ep * c.etp > 1:
            dims = ("pp", "edp_replicate", "edp_shard", "ep", "etp")
            views["expert_shard"] = View(dims, (c.pp, *self._copies(world_size, rest, edp), c.ep, c.etp))
            data_dims += dims[1:3]
        return Layout(views, data_dims=data_dims, sequence_dims=("cp",))

    def _copies(self, world_size: int, copies: int, edp: int) -> tuple[int, int]:
        """Return edp as the copies of the experts, and the ranks over which each is sharded."""
        copies = copies if edp > 1 else 1
        if edp % copies:
            c = self._config
            have, needed = (c.dp_shard or 1) * c.cp * c.tp, c.ep * c.etp
            raise ValueError(
                f"of {world_size}, dp_shard {c.dp_shard} x cp {c.cp} x tp {c.tp} = {have} have a copy of the "
                f"weights, and ep {c.ep} x etp {c.etp} = {needed} one of the experts, which does not divide "
                f"{have}; dp_shard = {lcm(needed, c.cp * c.tp) // (c.cp * c.tp)} or a multiple would do"
            )
        return copies, edp // copies

    def _rest(self, world_size: int, degrees: dict[str, int]) -> int:
        """Return the data-parallel size that ``degrees`` leave."""
        needed = prod(degrees.values())
        if world_size % needed:
            c = self._config
            unit = lcm(c.pp * (c.dp_shard or 1) * c.cp * c.tp, c.pp * c.ep * c.etp)
            low = world_size // unit * unit
            sizes = f"{low} or {low + unit}" if low else f"{unit} or {2 * unit}"
            product = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
            raise ValueError(f"{product} = {needed} does not divide {world_size}; {sizes} ranks would do")
        return world_size // needed
