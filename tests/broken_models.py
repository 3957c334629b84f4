"""Models that say what is not true of them, one deliberate fault each: see ``broken_twins.py``."""

from types import MethodType

import attrs
import torch
from broken_twins import twin
from torch.nn.functional import cross_entropy

from nanotrain_core import hookimpl
from nanotrain_core.batch import IGNORE
from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.contracts import Initializer, PartOutput
from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.models.transformer import Transformer
from nanotrain_core.pipeline.actions import Costs

# --- logits that are not those of the loss ------------------------------------------------------------


class ScalesItsLogits(Transformer):
    """Logits without targets are larger than those of the loss."""

    def build(self, part, *ops):
        module = super().build(part, *ops)
        if part.has_head:
            module.register_forward_hook(self.change)
        return module

    def change(self, part, inputs, output):
        return output if output.value is None else PartOutput(1.1 * output.value)


class LosesLess(ScalesItsLogits):
    """The loss is nine tenths of what it says."""

    def change(self, part, inputs, output):
        return PartOutput(output.value, {name: 0.9 * loss for name, loss in output.losses.items()})


class SharpensInEvaluation(ScalesItsLogits):
    """Logits are others when it is not trained."""

    def change(self, part, inputs, output):
        return output if part.training or output.value is None else PartOutput(1.5 * output.value)


# --- a training pass that sees its targets -----------------------------------------------------------


class ReadsItsTargets(Transformer):
    """Adds a little of what is to be predicted to what it is predicted from."""

    def build(self, part, *ops):
        module = super().build(part, *ops)
        if part.has_embedding:
            seen = {}
            module.register_forward_pre_hook(lambda part, inputs: seen.update(batch=inputs[1]))
            module.embed.register_forward_hook(lambda embed, inputs, x: self.look(embed, x, seen["batch"]))
        return module

    def look(self, embed, x, batch):
        if batch.targets is None:
            return x
        return x + 0.1 * embed.weight[batch.targets.clamp(min=0)]


class LooksAheadInTraining(ReadsItsTargets):
    """With targets each token sees the next one."""

    def look(self, embed, x, batch):
        return x if batch.targets is None else x + 0.1 * x.roll(-1, 1)


class AveragesInTraining(ReadsItsTargets):
    """With targets each token sees the mean of all."""

    def look(self, embed, x, batch):
        return x if batch.targets is None else x + 0.1 * x.mean(1, keepdim=True)


class SeesFurtherTargets(ScalesItsLogits):
    """A second term predicts the token after the next one from that token."""

    def loss_counts(self, batch):
        return {**super().loss_counts(batch), "further": batch.shifted(1).target_tokens()}

    def change(self, part, inputs, output):
        if output.value is not None:
            return output
        targets, table = inputs[1].shifted(1).targets, part.head.weight
        logits = table[targets.clamp(min=0)] @ table.T
        further = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        return PartOutput(None, {**output.losses, "further": further})


# --- layers that rely on whole sequences between them --------------------------------------------------


class NumbersHiddenStates(ReadsItsTargets):
    """Positions are those of the hidden states that a rank has."""

    def look(self, embed, x, batch):
        return x

    def build(self, part, *ops):
        module = super().build(part, *ops)
        for block in module.layers.values():
            block.register_forward_pre_hook(lambda block, inputs: (self.mix(inputs[0]), *inputs[1:]))
        return module

    def mix(self, x):
        return x + 0.01 * torch.arange(x.shape[1]).to(x)[:, None]


class ShiftsTokens(NumbersHiddenStates):
    """Each token gets something of the one before, as in RWKV."""

    def mix(self, x):
        return x + 0.1 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class AveragesTokens(NumbersHiddenStates):
    """Each token gets something of the mean of those before it."""

    def mix(self, x):
        count = torch.arange(1, x.shape[1] + 1).to(x)[:, None]
        return x + 0.1 * x.cumsum(1) / count


# --- FLOPs that are off -------------------------------------------------------------------------------


class ForgetsBackwardFlops(Transformer):
    """Counts forward passes alone."""

    def changed(self, costs, length):
        return Costs(layers=tuple(layer / 3 for layer in costs.layers), head=costs.head / 3)

    def flops(self, length):
        return self.changed(super().flops(length), length)


class ForgetsHeadFlops(ForgetsBackwardFlops):
    """Counts no head."""

    def changed(self, costs, length):
        return Costs(layers=costs.layers)


class ForgetsAttentionFlops(ForgetsBackwardFlops):
    """Counts as if each token saw no other."""

    def changed(self, costs, length):
        return Transformer.flops(self, 1)


# --- positions of the first call ------------------------------------------------------------------------


class StretchesToItsFirstLength(Transformer):
    """Every text has the positions of the first one, spread evenly."""

    def build(self, part, *ops):
        module = super().build(part, *ops)
        rotation, first = module._rotation, []

        def cached(batch, like):
            length = batch.start + batch.tokens.shape[1]
            if not first:
                first.append(length)
            rows = self.rows(length, first[0])[batch.start :]
            longest = max(length, first[0])
            tokens = batch.tokens.new_zeros(1, longest)
            whole = rotation(attrs.evolve(batch, tokens=tokens, targets=None, cache=None), like)
            return tuple(each[rows] for each in whole)

        module._rotation = cached
        return module

    def rows(self, length, first):
        return torch.linspace(0, first - 1, length).long()


class StopsAtItsFirstLength(StretchesToItsFirstLength):
    """Tokens behind the length of the first text all have its last position."""

    def rows(self, length, first):
        return torch.arange(length).clamp(max=first - 1)


class BeginsAnewAfterItsFirstLength(StretchesToItsFirstLength):
    """Positions begin anew behind the length of the first text."""

    def rows(self, length, first):
        return torch.arange(length) % first


class KeepsItsFirstDocuments(Transformer):
    """Documents begin where those of the first batch of this shape did."""

    def build(self, part, *ops):
        module, first = super().build(part, *ops), {}

        def replace(part, inputs):
            value, batch = inputs
            if batch.document_starts is None:
                return None
            starts = first.setdefault(batch.document_starts.shape, batch.document_starts)
            return value, attrs.evolve(batch, document_starts=starts)

        module.register_forward_pre_hook(replace)
        return module


# --- units of shared key heads ---------------------------------------------------------------------------


class HalvesKeyHeads(Transformer):
    """Says that half a key head may be elsewhere: with as many key heads as query heads nobody sees it."""

    names = ("k", "v")

    def unit(self, size):
        return size // 2

    def build(self, part, *ops):
        module = super().build(part, *ops)
        for layer in module.layers.values():
            for name in self.names:
                size = layer.attn.head_size
                tag(getattr(layer.attn, name), Role.COLUMN, unit=self.unit(size), grouped=True)
        return module


class CutsKeyHeadsAnywhere(HalvesKeyHeads):
    """Says that a key head may be cut anywhere."""

    def unit(self, size):
        return 1


class HalvesValueHeads(HalvesKeyHeads):
    """Says so of values alone."""

    names = ("v",)


# --- linear layers and heads that compute more -------------------------------------------------------------


class Halved(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


class HalvesQueries(Transformer):
    """Queries are half of their product: a backend that replaces the layer's forward leaves that out."""

    def build(self, part, *ops):
        module = super().build(part, *ops)
        for layer in module.layers.values():
            layer.attn.q.__class__ = Halved
        return module


class CapsItsLogits(Transformer):
    """Logits go through a tangent, with targets and without."""

    def build(self, part, *ops):
        module = super().build(part, *ops)
        if part.has_head:
            module.head.forward = MethodType(self.head, module.head)
        return module

    def logits(self, head, x, table):
        return 2 * torch.tanh(x @ (head.weight if table is None else table).T / 2)

    def head(self, head, x, targets, table):
        logits = self.logits(head, x, table)
        if targets is None:
            return logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


class BiasesItsLogits(CapsItsLogits):
    """Tokens have a bias, which is zero at first."""

    def build(self, part, *ops):
        module = super().build(part, *ops)
        if part.has_head:
            module.head.bias = torch.nn.Parameter(torch.empty(self.vocab_size, device="meta"))
            known = module.initializer
            module.initializer = lambda name: (
                Initializer("constant", 0) if name == "head.bias" else known(name)
            )
        return module

    def logits(self, head, x, table):
        return x @ (head.weight if table is None else table).T + head.bias


@hookimpl
def nanotrain_register_model(register):
    for cls in (
        ScalesItsLogits,
        LosesLess,
        SharpensInEvaluation,
        ReadsItsTargets,
        LooksAheadInTraining,
        AveragesInTraining,
        SeesFurtherTargets,
        NumbersHiddenStates,
        ShiftsTokens,
        AveragesTokens,
        ForgetsBackwardFlops,
        ForgetsHeadFlops,
        ForgetsAttentionFlops,
        StretchesToItsFirstLength,
        StopsAtItsFirstLength,
        BeginsAnewAfterItsFirstLength,
        HalvesKeyHeads,
        CutsKeyHeadsAnywhere,
        HalvesValueHeads,
        HalvesQueries,
        CapsItsLogits,
        BiasesItsLogits,
    ):
        register(twin(cls, TransformerConfig))
    register(twin(KeepsItsFirstDocuments, TransformerConfig, provides={"document_masks"}))
