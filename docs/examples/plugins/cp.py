"""Context parallelism (DeepSpeed-Ulysses, arXiv 2309.14509): ranks share each sequence, and heads to attend.

Only attention may mix tokens, besides routers: two all-to-alls around it exchange tokens for heads and back,
exactly. A model that mixes them elsewhere, as by a convolution over tokens, trains wrong, and nothing tells.

Shapes: R ranks, B batch, S sequence, s this rank's part of it, H heads, h = H / R, K size of a head, D width.
"""

from dataclasses import replace
from math import lcm

import attrs

from nanotrain_core.api import Component, Role, StaysEager, divisibility_of, hookimpl


@attrs.define(frozen=True, kw_only=True)
class ContextParallelConfig:
    """`[[parallel]] use = "cp"`, with `[topology] cp`: no keys."""


def check(recipe, config, layout):
    """Check that the heads which tensor parallelism leaves each rank, or repeats there, divide."""
    cp, tp = layout.degree("cp"), layout.degree("tp")
    for extent in divisibility_of(recipe.model.config) or ():
        heads = (lcm(extent.units, tp) if extent.grouped else extent.units) // tp
        if extent.heads and heads % cp:
            yield extent.problem("tp x cp" if tp > 1 else "cp", tp * cp)


def stays_eager(recipe, config, layout):
    if layout.degree("cp") > 1:
        yield StaysEager(Role.BLOCK, "attention exchanges heads for tokens between ranks")


@hookimpl
def nanotrain_register_parallel(register):
    register(
        Component(
            name="cp",
            config=ContextParallelConfig,
            factory=f"{__name__}:build",
            summary="shares sequences over ranks, and heads while they attend",
            mesh_dims={"cp"},
            check=check,
            stays_eager=stays_eager,
        )
    )


def build(config):
    import torch

    from nanotrain_core.api import NanotrainError, tagged, take_over
    from nanotrain_core.api.torch import Parallel, count_of, share_of

    class AllToAll(torch.autograd.Function):
        """Send rows of x [N, ...], so many to each rank, and receive so many; backward goes the other way."""

        @staticmethod
        def forward(ctx, x, exchange, sent, received):
            ctx.back = exchange, received, sent
            rows = x.new_empty(sum(received), *x.shape[1:])
            return exchange.all_to_all(rows, x.contiguous(), received, sent)()

        @staticmethod
        def backward(ctx, d_rows):
            return AllToAll.apply(d_rows, *ctx.back), None, None, None

    class ContextParallel(Parallel):
        def around(self, mesh):
            return {"attention": self.attend} if mesh.layout.size(*mesh.layout.sequence_dims) > 1 else {}

        def apply(self, part, placements, mesh):
            if self.around(mesh):
                self.ranks, self.index = mesh.size("cp"), mesh.coordinate("cp")
                self.exchange, roles = mesh.exchange("cp"), [tag.role for _, _, tag in tagged(part)]
                for module in (module for _, module, tag in tagged(part) if tag.role is Role.ROUTER):
                    take_over(module, self.route)
                part.register_forward_pre_hook(lambda part, args: self.begin(args[1]))
                part.register_forward_hook(lambda part, *_: self.end(roles.count(Role.BLOCK) * part.training))
            return part

        def begin(self, batch):
            ends = [share_of(batch.length, index, self.ranks) for index in range(self.ranks)]
            self.parts, self.own = batch.whole and [end - first for first, end in ends], ends[self.index]
            self.calls = 0

        def end(self, blocks):
            if self.calls < blocks:  # of a model whose tokens would not see those of other ranks
                raise NanotrainError(f"cp: {blocks} layers called ops.attention {self.calls} times")

        def attend(self, attention, q, k, v, *more):
            """Attend with h heads to all tokens; q [B, s, H, K], k, v and what is returned have all heads."""
            self.calls += 1
            if self.parts is None:  # sequences are whole on every rank, as where text is sampled
                return attention(q, k, v, *more)
            if wrong := [x.shape[2] for x in (q, k) if x.shape[2] % self.ranks]:
                raise NanotrainError(f"cp: {wrong[0]} heads do not divide by cp = {self.ranks}")
            q, k, v = (self.join(x.unflatten(2, (self.ranks, -1)).permute(2, 1, 0, 3, 4)) for x in (q, k, v))
            y, sent = attention(q, k, v, *more).transpose(0, 1), [self.parts[self.index]] * self.ranks
            y = AllToAll.apply(y, self.exchange, self.parts, sent).unflatten(0, (self.ranks, -1))
            return y.permute(2, 1, 0, 3, 4).flatten(2, 3)

        def join(self, x):
            """Send x [R, s, B, ...], tokens for each rank; return [B, S, ...] from all of them."""
            sent = [x.shape[1]] * self.ranks
            return AllToAll.apply(x.flatten(0, 1), self.exchange, sent, self.parts).transpose(0, 1)

        def route(self, router, x):
            """Route whole sequences, of which balance losses are; keep the choices for this rank's tokens."""
            if self.parts is None:
                return type(router).forward(router, x)
            routing = type(router).forward(router, self.join(x.transpose(0, 1).repeat(self.ranks, 1, 1, 1)))
            experts, weights = (x[:, slice(*self.own)] for x in (routing.experts, routing.weights))
            load = None if routing.load is None else count_of(experts, len(routing.load))
            return replace(routing, experts=experts, weights=weights, load=load)

    return ContextParallel()
