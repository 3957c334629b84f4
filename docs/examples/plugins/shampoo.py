"""Shampoo: gradients of matrices between inverse fourth roots of L = sum G G^T and R = sum G^T G.

Everything else has SGD with momentum. Source: Gupta et al., arXiv 1802.09568, algorithm 1.
L and R belong to no piece of a matrix: a rank keeps them once for each matrix of which it has pieces, in
one range or in several. So it runs on every layout.
"""

import attrs

from nanotrain_core.api import Component, OptimizerConfig, Range, Role, hookimpl


@attrs.define(frozen=True, kw_only=True)
class ShampooConfig(OptimizerConfig):
    """`[optimizer] use = "shampoo"`: these keys, and lr, clip_norm and lr_schedule of every optimizer."""

    momentum: float = attrs.field(default=0.9, validator=Range(0.0, 1.0))
    """Decay of the sum of preconditioned gradients."""
    weight_decay: float = attrs.field(default=0.0, validator=Range(0.0, 1e3))
    """Decoupled, of matrices and embeddings."""
    eps: float = attrs.field(default=1e-4, validator=Range(1e-12, 1.0))
    """Added to the eigenvalues of L and R."""


@hookimpl
def nanotrain_register_optimizer(register):
    factory = f"{__name__}:build"
    summary = "gradients of matrices between inverse roots of L and R, SGD for the rest"
    register(Component(name="shampoo", config=ShampooConfig, factory=factory, summary=summary))


def build(config):
    import torch

    from nanotrain_core.api.torch import Block, MasterOptimizer, WholeTensors

    def inverse_root(matrix):
        values, vectors = torch.linalg.eigh(matrix)
        return vectors * (values.clamp(min=0) + config.eps) ** -0.25 @ vectors.mT

    class Update(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for weight in group["params"]:
                    momentum = self.state[weight]["momentum"].mul_(config.momentum).add_(weight.grad)
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(momentum, alpha=-group["lr"])

    class Shampoo(MasterOptimizer):
        def make(self, groups):
            return Update(groups, {"lr": config.lr})

        def initial_state(self, weight):
            return {"momentum": torch.zeros_like(weight)}

        def setup(self, parameters, precision, gradients, mesh):
            super().setup(parameters, precision, gradients, mesh)
            apart = (Role.VOCAB, Role.POSITION, Role.HEAD)
            matrices = [shard for shard in self.master_shards if len(shard.placement.global_shape) == 2]
            self.matrices = [shard for shard in matrices if shard.placement.role not in apart]
            self.whole = WholeTensors([shard.piece for shard in self.matrices], mesh)
            self.statistics = {}  # name of a parameter -> L and R, on every rank that has a piece of it
            for shard in self.matrices:
                options = {"dtype": shard.weight.dtype, "device": mesh.device}
                sizes = shard.placement.global_shape
                self.statistics[shard.placement.name] = [torch.zeros(n, n, **options) for n in sizes]

        def precondition(self, gradients):
            number_of = {shard.piece: number for number, shard in enumerate(self.master_shards)}
            own = {shard.piece: gradients[number_of[shard.piece]] for shard in self.matrices}
            for name, whole in self.whole.gather(own):
                if name not in self.statistics:  # only other ranks have pieces of it
                    continue
                left, right = self.statistics[name]
                gradient = whole.to(left.dtype)
                left.add_(gradient @ gradient.mT)
                right.add_(gradient.mT @ gradient)
                update = inverse_root(left) @ gradient @ inverse_root(right)
                for piece, part in self.whole.pieces(name, update):
                    gradients[number_of[piece]] = part

        def blocks(self):
            yield from super().blocks()
            yield from self.blocks_of_statistics(self.statistics)

        def blocks_of(self, parameters):
            yield from super().blocks_of(parameters)
            yield from self.blocks_of_statistics(name for name in self.statistics if name in parameters)

        def blocks_of_statistics(self, names):
            """Yield L and R as whole tensors: equal ones of several ranks are saved once."""
            for name in names:
                for side, matrix in zip(("left", "right"), self.statistics[name], strict=True):
                    yield Block(f"{side}/{name}", tuple(matrix.shape), (0, 0), matrix)

    return Shampoo(config)
