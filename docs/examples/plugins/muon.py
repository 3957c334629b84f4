"""Muon: momentum of matrices, orthogonalised; AdamW for embeddings, head and vectors.

Sources: Jordan et al., kellerjordan.github.io/posts/muon; Liu et al., arXiv 2502.16982, eq. 4, for its scale.
It is independent of layouts. With `parallel=[{use="zero12"}]` its state is sharded, and tp splits matrices:
`WholeTensors` assembles those that must be whole.
"""

import attrs

from nanotrain_core.api import Component, OptimizerConfig, Range, Role, hookimpl


@attrs.define(frozen=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """`[optimizer] use = "muon"`: lr, clip_norm and lr_schedule as of adamw, at the same rates."""

    momentum: float = attrs.field(default=0.95, validator=Range(0.0, 1.0))
    """Of matrices, with Nesterov's step."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of all else, as AdamW's."""
    weight_decay: float = attrs.field(default=0.1, validator=Range(0.0, 1e3))
    """Decoupled, of matrices and embeddings."""


@hookimpl
def nanotrain_register_optimizer(register):
    factory = f"{__name__}:build"
    summary = "orthogonalised momentum of matrices, AdamW for the rest"
    register(Component(name="muon", config=MuonConfig, factory=factory, summary=summary))


def build(config):
    import torch

    from nanotrain_core.api.torch import MasterOptimizer, WholeTensors

    def orthogonalise(matrix, steps=5):
        """Return U V^T of a matrix, or of each of a stack, U S V^T, about: a Newton-Schulz iteration."""
        wide = matrix.shape[-2] <= matrix.shape[-1]
        x = matrix if wide else matrix.mT
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(steps):
            square = x @ x.mT
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        return x if wide else x.mT

    class Update(torch.optim.Optimizer):
        """Applies the updates that `precondition` computed to matrices, and AdamW's to all else."""

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for weight in group["params"]:
                    update = weight.grad if group["muon"] else self.adam(weight, *config.betas)
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

        def adam(self, weight, beta1, beta2):
            state = self.state[weight]
            state["step"] += 1
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            mean.lerp_(weight.grad, 1 - beta1)
            square.mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)
            root = (square / (1 - beta2 ** state["step"])).sqrt_().add_(1e-8)
            return mean / (1 - beta1 ** state["step"]) / root

    class Muon(MasterOptimizer):
        def options(self, slot):
            """Return a parameter's options by its role: embeddings and the head are matrices, too."""
            matrix = len(slot.placement.global_shape) > 1
            muon = matrix and slot.placement.role not in (Role.VOCAB, Role.POSITION, Role.HEAD)
            return {"muon": muon, "weight_decay": config.weight_decay if matrix else 0.0}

        def make(self, groups):
            return Update(groups, {"lr": config.lr, "muon": False})

        def state_of(self, slot):
            if slot.group["muon"]:
                return {"momentum": torch.zeros_like(slot.weight)}
            moments = {name: torch.zeros_like(slot.weight) for name in ("exp_avg", "exp_avg_sq")}
            return {"step": torch.zeros((), device=slot.weight.device), **moments}

        def setup(self, parameters, precision, gradients, mesh):
            super().setup(parameters, precision, gradients, mesh)
            self.matrices = [slot for slot in self.slots if slot.group["muon"]]
            self.whole = WholeTensors([slot.piece for slot in self.matrices], mesh)

        def precondition(self, gradients):
            number_of = {slot.piece: number for number, slot in enumerate(self.slots)}
            ahead = {}
            for slot in self.matrices:
                momentum, gradient = (
                    self.inner.state[slot.weight]["momentum"],
                    gradients[number_of[slot.piece]],
                )
                momentum.mul_(config.momentum).add_(gradient)
                ahead[slot.piece] = gradient.add(momentum, alpha=config.momentum)
            for name, matrix in self.whole.gather(ahead):
                update = orthogonalise(matrix) * 0.2 * max(matrix.shape[-2:]) ** 0.5
                for piece, part in self.whole.pieces(name, update):
                    gradients[number_of[piece]] = part

    return Muon(config)
