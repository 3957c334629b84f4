"""A plugin in one file, with deliberate faults of each kind: what the harness must catch.

Those of precisions and checkpoints lie beside it, in files of their own.

Loaded by path, as with ``nanotrain run --plugin tests/broken_twins.py``. It imports torch because it is
its own factory's module; the face of an installed plugin must not.
"""

import re
from dataclasses import replace
from types import MethodType

import attrs
import torch

from nanotrain_core import hookimpl
from nanotrain_core.batch import Batch, Shard
from nanotrain_core.builtin import configs
from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.component import Component
from nanotrain_core.contracts import Monitor, Parallel, PartOutput
from nanotrain_core.data.synthetic import Synthetic
from nanotrain_core.layout.grid import Grid
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.roles import Role, tagged
from nanotrain_core.metrics.declared import Bins, Metric
from nanotrain_core.models.transformer import Transformer
from nanotrain_core.optim.adamw import AdamW
from nanotrain_core.optim.sgd import SGD
from nanotrain_core.pipeline.accumulate import Accumulate
from nanotrain_core.pipeline.actions import Action, Costs
from nanotrain_core.recipe.phase import CHANGEABLE
from nanotrain_core.testing.components.all_reduce_gradients import SummedGradients
from nanotrain_core.testing.components.moe import RoutedConfig
from nanotrain_core.testing.components.moe_model import Routed
from nanotrain_core.testing.components.tensor_parallel_layers import Sliced


@attrs.define(frozen=True, kw_only=True)
class NoKeys:
    """A table without keys."""


class OverlappingView(View):
    """Rank 3 believes that it shares its layers with rank 1 too."""

    def ranks(self, rank, dims):
        group = super().ranks(rank, dims)
        return (1, *group) if rank == 3 and tuple(dims) == ("tp",) else group


class RankInTwoGroups(Grid):
    def layout(self, world_size):
        layout = super().layout(world_size)
        views = {name: OverlappingView(v.dims, v.sizes) for name, v in layout.views.items()}
        return Layout(views, layout.data_dims)


@attrs.define(frozen=True, kw_only=True)
class WeightedConfig(TransformerConfig):
    """A model with a number that phases may change."""

    lm_weight: float = attrs.field(default=1.0, metadata={CHANGEABLE: True})


class ForgetsToChange(Transformer):
    """Weighs its loss, and goes on doing so as it was built."""

    def __init__(self, config):
        super().__init__(config)
        self.loss_weights = {"lm": config.lm_weight}

    def change(self, config, parts):
        pass


class MeanLoss(Transformer):
    """Divides by the microbatch's own count, so that unequal microbatches weigh the same."""

    def build(self, part, *ops):
        module = super().build(part, *ops)
        module.register_forward_hook(self.mean)
        return module

    @staticmethod
    def mean(module, inputs, output):
        count = inputs[1].target_tokens().clamp(min=1) if inputs[1].targets is not None else 1
        return PartOutput(output.value, {name: loss / count for name, loss in output.losses.items()})


class ReadsAhead(Transformer):
    """Reads a weight of its first layer before it calls it."""

    def build(self, part, *ops):
        module = super().build(part, *ops)
        if part.has_embedding:
            layer = module.layers["0"].attn.q
            module.embed.register_forward_hook(lambda embed, tokens, x: x + 0 * layer.weight.sum())
        return module


class MixesHeads(Transformer):
    """What its queries are made of crosses the units that it says must stay together."""

    def build(self, part, *ops):
        module = super().build(part, *ops)
        for layer in module.layers.values():
            layer.attn.q.register_forward_hook(lambda q, x, y: y.roll(1, -1))
        return module


class PenalizesHiddenStates(Transformer):
    """A loss term of the hidden states behind its layers, of which a rank may have a share of the tokens."""

    def __init__(self, config):
        super().__init__(config)
        self.loss_weights = {"lm": 1.0, "penalty": 0.1}

    def loss_counts(self, batch):
        return {**super().loss_counts(batch), "penalty": torch.tensor(batch.tokens.numel())}

    def build(self, part, *ops):
        module, kept = super().build(part, *ops), []

        def add(part, inputs, output):
            penalty = kept.pop().square().mean(-1).sum()
            return (
                output
                if output.value is not None
                else PartOutput(None, {**output.losses, "penalty": penalty})
            )

        if part.has_head:
            module.norm.register_forward_pre_hook(lambda norm, inputs: kept.append(inputs[0]))
            module.register_forward_hook(add)
        return module


class CountsAll(Transformer):
    """Counts ignored targets too."""

    def loss_counts(self, batch):
        return {"lm": torch.tensor(batch.targets.numel())}


class ForgetsItsPlace(Transformer):
    """Turns the tokens of every pass as if they were the first ones."""

    def build(self, part, *ops):
        module = super().build(part, *ops)
        rotation = module._rotation
        module._rotation = lambda batch, like: rotation(Batch(batch.tokens), like)
        return module


class HidesExperts(Routed):
    """Its stacked experts say nothing of themselves: every wrapper leaves them whole, on all ranks."""

    def build(self, part, *ops):
        module = super().build(part, *ops)
        for _, experts, found in list(tagged(module)):
            if found.role is Role.EXPERTS:
                del experts.nanotrain_tag
        return module


class CountsTwice(Routed):
    """Its routers count tokens inside of their layer, which activation checkpointing runs again."""

    def build(self, part, *ops):
        module = super().build(part, *ops)
        for _, router, found in tagged(module):
            if found.role is Role.ROUTER:
                router.register_forward_hook(self.count)
        return module

    @staticmethod
    def count(router, args, routing):
        if routing.load is not None:
            router.add_load(routing.load)
        return replace(routing, load=None)


class NumbersExperts(Routed):
    """Its experts know which of all they are by their place."""

    def build(self, part, *ops):
        module = super().build(part, *ops)
        for _, experts, found in tagged(module):
            if found.role is Role.EXPERTS:
                experts.compute = MethodType(self.compute, experts)
        return module

    @staticmethod
    def compute(experts, rows, counts):
        scale = 1 + torch.arange(len(counts)).repeat_interleave(counts)
        return type(experts).compute(experts, rows, counts) * scale.unsqueeze(1)


class DropsOneSum(SummedGradients):
    def __init__(self, config):
        super().__init__()

    def to_sum(self):
        return self.placed[:-1]


class SumsOnlyWhatItHas(SummedGradients):
    def __init__(self, config):
        super().__init__()

    def to_sum(self):
        return [placed for placed in self.placed if placed.parameter.grad is not None]


class ChangesNothing(Parallel):
    """Says that it handles a dimension, and lets all ranks along it do the same work."""

    def __init__(self, config):
        self.config = config

    def apply(self, part, placements, mesh):
        return part


class ForgetsInner(Sliced):
    """Takes a rank's gradient of a norm of its own heads for the whole: right where a model has none."""

    def __init__(self, config):
        super().__init__()

    def apply(self, part, placements, mesh):
        before = dict(placements)
        super().apply(part, placements, mesh)
        for name, module, found in tagged(part):
            if found.role is Role.INNER:
                for key, _ in module.named_parameters():
                    placements[f"{name}.{key}"] = before[f"{name}.{key}"]
        return part


class AddsEveryBias(ForgetsInner):
    """Adds the bias of a ROW as often as there are ranks: of a model without biases it is right."""

    def apply(self, part, placements, mesh):
        Sliced.apply(self, part, placements, mesh)
        for _, module, found in tagged(part):
            if found.role is Role.ROW and module.bias is not None and mesh.size("tp") > 1:
                module.register_forward_hook(lambda row, x, y: y + (mesh.size("tp") - 1) * row.bias)
        return part


class DropsBackward(Accumulate):
    """Never runs the last backward pass of 3 microbatches: the tiny recipe, with 4, is not refused."""

    def drops(self, microbatches):
        return microbatches == 3

    def actions(self, pp, microbatches):
        last = Action("B", 0, microbatches - 1) if self.drops(microbatches) else None
        return tuple(tuple(a for a in mine if a != last) for mine in super().actions(pp, microbatches))


class TurnsAround(Accumulate):
    """Begins with the last microbatch every second time that it is asked."""

    asked = 0

    def actions(self, pp, microbatches):
        self.asked += 1
        sign = (-1) ** self.asked
        lists = super().actions(pp, microbatches)
        return tuple(tuple(sorted(each, key=lambda action: sign * action.microbatch)) for each in lists)


class DropsBackwardOfModels(DropsBackward):
    """Never runs the last backward pass once it has seen what a model costs: on paper all is well."""

    paper = True

    def parts(self, costs, pp):
        self.paper = costs == Costs.alike(len(costs.layers))
        return super().parts(costs, pp)

    def drops(self, microbatches):
        return not self.paper


class NeverClips(SGD):
    def __init__(self, config):
        super().__init__(attrs.evolve(config, clip_norm=0.0))


class AsLongAsItsPiece(SGD):
    """Steps as far as a weight is long, LARS, of which it takes what the rank updates for the whole."""

    def precondition(self, gradients):
        for number, shard in enumerate(self.master_shards):
            ratio = shard.master.load().norm() / gradients[number].norm().clamp(min=1e-30)
            gradients[number] = gradients[number] * ratio


class Climbs(SGD):
    """Moves along the gradient."""

    def make(self, groups):
        return torch.optim.SGD(groups, lr=self.config.lr, momentum=self.config.momentum, maximize=True)


class DecaysEverything(AdamW):
    """Takes the groups for one."""

    def make(self, groups):
        return super().make([{**group, "weight_decay": self.config.weight_decay} for group in groups])


class DecaysNothing(AdamW):
    def make(self, groups):
        return super().make([{**group, "weight_decay": 0.0} for group in groups])


class DropsErrors(AdamW):
    """Takes masters that need their error carried, and does not carry it."""

    def carry(self, shard, error):
        pass


class Fading(torch.optim.SGD):
    """Divides the rate by the number of its steps, which it counts in a list, where no one looks for it."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.calls = [0]

    def step(self):
        self.calls[0] += 1
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate / self.calls[0]
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


class CountsCalls(SGD):
    """Takes the calls of its ``inner.step`` for the steps of the run."""

    def make(self, groups):
        return Fading(groups, lr=self.config.lr, momentum=self.config.momentum)

    def meta(self):
        return {**super().meta(), "calls": self.inner.calls[0]}

    def load_meta(self, meta):
        super().load_meta(meta)
        self.inner.calls[0] = meta["calls"]


class ForgetsItsCount(SGD):
    """Shrinks updates every tenth step, by a count that no checkpoint has."""

    steps = 0

    def precondition(self, gradients):
        self.steps += 1
        if self.steps % 10 == 0:
            torch._foreach_mul_(gradients, 0.5)


class SumsInItsStep(SummedGradients, SGD):
    """Owns gradients too, and completes them only for itself: who looks before the update sees parts."""

    def __init__(self, config):
        SummedGradients.__init__(self)
        SGD.__init__(self, config)

    def finish(self):
        pass

    def step(self, **options):
        SummedGradients.finish(self)
        return SGD.step(self, **options)


class DrawsNumbers(Monitor):
    def __init__(self, config):
        self.config = config

    def on_step(self, report):
        torch.rand(1)


class ChangesGradients(DrawsNumbers):
    on_step = Monitor.on_step

    def on_start(self, run):
        self.placed = run.placed

    def on_before_update(self, update):
        self.placed[0].parameter.grad.mul_(1.5)


class PublishesAnything(DrawsNumbers):
    """Publishes a name that it does not declare."""

    on_step = Monitor.on_step

    def on_start(self, run):
        self.metrics = run.metrics

    def on_before_update(self, update):
        self.metrics.scalar("ratio", 1.0)


class WaitsToPublish(PublishesAnything):
    """Reads the device's number before it publishes it."""

    def on_before_update(self, update):
        self.metrics.scalar("size", sum(g.tensor.abs().sum().item() for g in update.gradients()))


class CountsOnOneRank(DrawsNumbers):
    """Publishes a histogram of what layers return for the sequences of rank 0 alone."""

    on_step = Monitor.on_step

    def on_start(self, run):
        self.metrics, self.rank = run.metrics, run.rank
        run.observe_outputs(self.look)

    def look(self, name, output):
        if self.rank == 0:
            self.metrics.histogram("sizes", output)


class MeasuresOnOneRank(CountsOnOneRank):
    """Publishes a number of these alone."""

    def look(self, name, output):
        if self.rank == 0:
            self.metrics.scalar(f"size/{name}", output.abs().mean())


class MeasuresItsShare(DrawsNumbers):
    """Publishes the size of a whole weight's gradient, and leaves out what other ranks have of the weight."""

    on_step = Monitor.on_step

    def on_start(self, run):
        self.metrics = run.metrics

    def on_before_update(self, update):
        for gradient in update.gradients():
            if gradient.name == "layers.0.attn.o.weight":
                self.metrics.scalar("share", gradient.tensor.double().square().sum())


class DrawsBeforeSaving(DrawsNumbers):
    on_step = Monitor.on_step

    def on_before_save(self, step):
        torch.rand(1)


class ForgetsByItself(DrawsNumbers):
    """Says what it has seen, and does not take it back."""

    seen = 0

    def on_step(self, report):
        self.seen += 1

    def meta(self):
        return {"seen": self.seen}


class IgnoresTheShard(Synthetic):
    def train_batch(self, sequences, shard):
        return super().train_batch(sequences, Shard(0, shard.count))


class TakesAnyPosition(Synthetic):
    """Goes to a position whatever data it is of."""

    def load_meta(self, meta):
        self.position = meta["position"]


class NeverEndsValidation(Synthetic):
    """Begins validation again after the last batch."""

    def validation_batch(self, index, sequences, shard):
        return super().validation_batch(index, sequences, shard) or super().validation_batch(
            0, sequences, shard
        )


def twin(cls, config=NoKeys, **more):
    """Describe a class under its name in small letters: ``RankInTwoGroups`` as ``rank_in_two_groups``."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
    factory = f"{cls.__module__}:{cls.__name__}"
    return Component(name=name, config=config, factory=factory, summary="broken", **more)


@hookimpl
def nanotrain_register_topology(register):
    register(twin(RankInTwoGroups, configs.GridConfig))


@hookimpl
def nanotrain_register_model(register):
    register(twin(MeanLoss, TransformerConfig))
    register(twin(ForgetsToChange, WeightedConfig))
    register(twin(ReadsAhead, TransformerConfig))
    register(twin(MixesHeads, TransformerConfig))
    register(twin(PenalizesHiddenStates, TransformerConfig))
    register(twin(CountsAll, TransformerConfig))
    register(twin(ForgetsItsPlace, TransformerConfig))
    register(twin(NumbersExperts, RoutedConfig))
    register(twin(CountsTwice, RoutedConfig))
    register(twin(HidesExperts, RoutedConfig))


@hookimpl
def nanotrain_register_parallel(register):
    for cls in (DropsOneSum, SumsOnlyWhatItHas):
        register(twin(cls, provides={"gradient_sync"}, mesh_dims={"dp"}))
    for cls in (ChangesNothing, ForgetsInner, AddsEveryBias):
        register(twin(cls, mesh_dims={"tp"}))


@hookimpl
def nanotrain_register_schedule(register):
    register(twin(DropsBackward))
    register(twin(DropsBackwardOfModels))
    register(twin(TurnsAround))


@hookimpl
def nanotrain_register_optimizer(register):
    register(twin(NeverClips, configs.SGDConfig))
    register(twin(AsLongAsItsPiece, configs.SGDConfig))
    register(twin(Climbs, configs.SGDConfig))
    register(twin(DecaysEverything, configs.AdamWConfig))
    register(twin(DecaysNothing, configs.AdamWConfig))
    register(twin(DropsErrors, configs.AdamWConfig))
    register(twin(CountsCalls, configs.SGDConfig))
    register(twin(ForgetsItsCount, configs.SGDConfig))
    register(twin(SumsInItsStep, configs.SGDConfig, provides={"gradient_sync"}, mesh_dims={"dp"}))


@hookimpl
def nanotrain_register_monitor(register):
    for cls in (DrawsNumbers, DrawsBeforeSaving, ChangesGradients, ForgetsByItself, PublishesAnything):
        register(twin(cls))
    size = Metric(name="size", unit="1", group="gradients", summary="sum of magnitudes", reduce="sum")
    register(attrs.evolve(twin(WaitsToPublish), metrics=[size]))
    sizes = Metric(
        name="sizes",
        unit="1",
        group="gradients",
        summary="magnitudes",
        kind="histogram",
        bins=Bins(low=1e-9, high=1e3, log=True),
    )
    register(attrs.evolve(twin(CountsOnOneRank), metrics=[sizes]))
    of_layers = attrs.evolve(size, name="size/{block}", reduce="mean", cost="layers")
    register(attrs.evolve(twin(MeasuresOnOneRank), metrics=[of_layers]))
    share = attrs.evolve(size, name="share", reduce="mean", cost="weights")
    register(attrs.evolve(twin(MeasuresItsShare), metrics=[share]))


@hookimpl
def nanotrain_register_data(register):
    for cls in (IgnoresTheShard, TakesAnyPosition, NeverEndsValidation):
        register(twin(cls, configs.SyntheticConfig))
