"""Topologies, wrappers and schedules with one deliberate fault each: see ``broken_twins.py``."""

import attrs
import torch
from broken_twins import twin

from nanotrain_core import hookimpl
from nanotrain_core.builtin import configs
from nanotrain_core.layout.grid import Grid
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.roles import Role, tagged
from nanotrain_core.pipeline.accumulate import Accumulate
from nanotrain_core.pipeline.actions import Action
from nanotrain_core.testing.components.all_reduce_gradients import SummedGradients
from nanotrain_core.testing.components.gpipe import Staged
from nanotrain_core.testing.components.tensor_parallel_layers import Sliced

# --- topologies that swap two ranks ------------------------------------------------------------------

SWAP = {1: 2, 2: 1}


class OtherCoordinates(View):
    """Ranks 1 and 2 have one another's coordinates, in their own groups."""

    def coordinate(self, rank, dim):
        return super().coordinate(SWAP.get(rank, rank), dim)

    def ranks(self, rank, dims):
        return View(self.dims, self.sizes).ranks(rank, dims)


class OtherGroups(View):
    """Ranks 1 and 2 are in one another's groups, at their own coordinates."""

    def ranks(self, rank, dims):
        group = View(self.dims, self.sizes).ranks(SWAP.get(rank, rank), dims)
        return tuple(sorted(SWAP.get(member, member) for member in group))


class OtherRanks(OtherGroups, OtherCoordinates):
    """Ranks 1 and 2 have changed places."""


class SwapsCoordinates(Grid):
    view = OtherCoordinates
    swapped = ("dense", "expert")
    fewest = 3

    def layout(self, world_size):
        layout = super().layout(world_size)
        if world_size < self.fewest:
            return layout
        views = {
            name: self.view(view.dims, view.sizes) if name in self.swapped else view
            for name, view in layout.views.items()
        }
        return Layout(views, layout.data_dims)


class SwapsGroups(SwapsCoordinates):
    view = OtherGroups


class SwapsRanks(SwapsCoordinates):
    view = OtherRanks


class SwapsExpertRanks(SwapsCoordinates):
    """Only where experts are."""

    view = OtherRanks
    swapped = ("expert",)


class SwapsRanksOfManyHosts(SwapsRanks):
    """Only in worlds that no machine has for a test."""

    fewest = 8


# --- gradient syncs ----------------------------------------------------------------------------------


class Sync(SummedGradients):
    def __init__(self, config):
        super().__init__()


class ForgetsBiases(Sync):
    """Sums no bias."""

    def to_sum(self):
        return [placed for placed in self.placed if not placed.placement.name.endswith("bias")]


class ForgetsInnerNorms(Sync):
    """Sums norms of heads over data-parallel ranks alone."""

    def to_sum(self):
        return [self.seen(placed) if "inner" in placed.placement.name else placed for placed in self.placed]

    def seen(self, placed):
        summed = placed.placement.summed & {"dp"}
        return attrs.evolve(placed, placement=attrs.evolve(placed.placement, summed=summed))


class ForgetsInnerBiases(ForgetsInnerNorms):
    """Sums the weight of a norm of heads, and not its bias."""

    def to_sum(self):
        return [
            self.seen(placed) if placed.placement.name.endswith("inner.bias") else placed
            for placed in self.placed
        ]


class ForgetsLayerNormBiases(Sync):
    """Sums a bias but for those of norms."""

    def to_sum(self):
        return [placed for placed in self.placed if not placed.placement.name.endswith("norm.bias")]


class SumsOverData(ForgetsInnerNorms):
    """Sums everything over dp, whatever its placement is."""

    def to_sum(self):
        return [self.seen(placed) for placed in self.placed]

    def seen(self, placed):
        changed = {"view": "dense", "sharded": frozenset(), "summed": frozenset({"dp"}), "stages": ()}
        return attrs.evolve(placed, placement=attrs.evolve(placed.placement, **changed))


class SumsOverTheWorld(SumsOverData):
    """Sums everything over all ranks."""

    def seen(self, placed):
        changed = {"view": "dense", "sharded": frozenset(), "summed": frozenset({"dp", "cp", "tp"})}
        return attrs.evolve(placed, placement=attrs.evolve(placed.placement, **changed))


class ForgetsStages(SumsOverData):
    """Sums over ranks of one stage alone: a table of two stages comes apart."""

    def seen(self, placed):
        return attrs.evolve(placed, placement=attrs.evolve(placed.placement, stages=()))


class SumsHeadsAlone(SumsOverData):
    """Over tp it sums what lies between COLUMN and ROW: right where each rank has whole sequences."""

    def to_sum(self):
        return [placed if "inner" in placed.placement.name else self.seen(placed) for placed in self.placed]


class SumsVectorsAlone(SumsOverData):
    """Over tp it sums norms and biases: of a model whose tokens are split, no embedding and no head."""

    def to_sum(self):
        return [placed if placed.parameter.dim() == 1 else self.seen(placed) for placed in self.placed]


class AveragesTables(Sync):
    """Takes the mean over tp of what it should sum, where it is a matrix."""

    def finish(self):
        super().finish()
        for placed in self.placed:
            if "tp" in placed.placement.summed and placed.parameter.dim() > 1:
                self._sums[placed.parameter].div_(self.mesh.size("tp"))


class KeepsItsFirstList(Sync):
    """Sums what had a gradient in the first step."""

    first = None

    def to_sum(self):
        if self.first is None:
            self.first = [placed for placed in self.placed if placed.parameter.grad is not None]
        return self.first


class DropsWhatComesLater(Sync):
    """Has zeros for what had no gradient in the first step."""

    first = None

    def finish(self):
        if self.first is None:
            self.first = {placed.parameter for placed in self.placed if placed.parameter.grad is not None}
        super().finish()

    def gradient(self, parameter):
        found = super().gradient(parameter)
        return found if self.first is None or parameter in self.first else torch.zeros_like(found)


class FreezesWhatIsUnused(Sync):
    """Has no more gradients of what had none in the first step."""

    steps = 0

    def finish(self):
        super().finish()
        self.steps += 1
        if self.steps == 1:
            for placed in self.placed:
                if placed.parameter.grad is None:
                    placed.parameter.requires_grad_(False)


class KeepsWhatWasUsed(Sync):
    """Has the gradient of the step before for what is used no more."""

    last = None

    def finish(self):
        super().finish()
        for parameter, total in self._sums.items():
            if self.last and not total.any():
                total.copy_(self.last[parameter])
        self.last = {parameter: total.clone() for parameter, total in self._sums.items()}


class LosesTheOddOne(Sync):
    """Adds up microbatches two by two, and loses the one that is left."""

    count = 0

    def microbatch_done(self, parameters):
        super().microbatch_done(parameters)
        self.count += 1

    def factor(self, count):
        return (count - 1) / count

    def finish(self):
        super().finish()
        count, self.count = self.count, 0
        if count > 1 and count % 2:
            for total in self._sums.values():
                total.mul_(self.factor(count))


class CountsTheOddOneTwice(LosesTheOddOne):
    """Adds up microbatches two by two, and takes the last one twice if it is alone."""

    def factor(self, count):
        return (count + 1) / count


class WantsPairs(LosesTheOddOne):
    """Does not know what to do with an odd number."""

    def factor(self, count):
        raise RuntimeError(f"{count} microbatches do not make pairs")


# --- tensor parallelism -------------------------------------------------------------------------------


class AddsBiasesOfFour(Sliced):
    """Of four ranks, each adds the bias of a ROW."""

    def __init__(self, config):
        super().__init__()

    def apply(self, part, placements, mesh):
        part = super().apply(part, placements, mesh)
        for _, module, found in tagged(part) if mesh.size("tp") == 4 else ():
            if found.role is Role.ROW and module.bias is not None:
                module.register_forward_hook(lambda module, args, y: y + 3 * module.bias)
        return part


class PlacesHeadsWhole(Sliced):
    """Splits what each head has an entry of, and says that it is whole."""

    def __init__(self, config):
        super().__init__()

    def apply(self, part, placements, mesh):
        before = dict(placements)
        part = super().apply(part, placements, mesh)
        for name, module, found in tagged(part):
            for key, _ in module.named_parameters() if found.role is Role.PER_HEAD else ():
                placements[f"{name}.{key}"] = before[f"{name}.{key}"]
        return part


# --- schedules ----------------------------------------------------------------------------------------


class Pipeline(Staged):
    def __init__(self, config):
        del config


class WantsEqualStages(Pipeline):
    """Refuses layers that do not divide by the stages."""

    def parts(self, costs, pp):
        if self.refuses(len(costs.layers), pp):
            raise ValueError(f"{len(costs.layers)} layers are not for {pp} ranks")
        return super().parts(costs, pp)

    def refuses(self, layers, pp):
        return layers % pp


class WantsPairsOfLayers(WantsEqualStages):
    """Refuses an odd number of layers."""

    def refuses(self, layers, pp):
        return pp > 1 and layers % 2


class WantsTwoLayersAStage(WantsEqualStages):
    """Refuses a stage of one layer."""

    def refuses(self, layers, pp):
        return pp > 1 and layers < 2 * pp


class StopsAtSixteen(Accumulate):
    """Runs no more than sixteen microbatches."""

    def actions(self, pp, microbatches):
        return tuple(
            tuple(action for action in mine if self.keeps(action.microbatch))
            for mine in super().actions(pp, microbatches)
        )

    def keeps(self, microbatch):
        return microbatch < 16


class LosesTheSeventeenth(StopsAtSixteen):
    """Runs all but one."""

    def keeps(self, microbatch):
        return microbatch != 16


class StopsAtAHundred(StopsAtSixteen):
    """Runs no more than a hundred."""

    def keeps(self, microbatch):
        return microbatch < 100


class TakesSixteenInTurn(Accumulate):
    """Begins anew after sixteen."""

    def actions(self, pp, microbatches):
        (mine,) = super().actions(pp, microbatches)
        return (tuple(attrs.evolve(action, microbatch=action.microbatch % 16) for action in mine),)


class SaysWhatOthersHold(Pipeline):
    """GPipe that says that it holds what 1F1B does."""

    def in_flight(self, pp, microbatches):
        return tuple(min(pp - rank, microbatches) for rank in range(pp))


class HoldsAll(Accumulate):
    """All forward passes before all backward passes, and it says one."""

    def actions(self, pp, microbatches):
        (mine,) = super().actions(pp, microbatches)
        return (tuple(sorted(mine, key=lambda action: action.kind != "F")),)


class PutsOffWeightGradients(Accumulate):
    """Leaves all weight gradients to the end, and says that it holds one microbatch."""

    def actions(self, pp, microbatches):
        (mine,) = super().actions(pp, microbatches)
        return ((*mine, *(Action("W", 0, m) for m in range(microbatches))),)


@hookimpl
def nanotrain_register_topology(register):
    for cls in (SwapsCoordinates, SwapsGroups, SwapsRanks, SwapsExpertRanks, SwapsRanksOfManyHosts):
        register(twin(cls, configs.GridConfig))


@hookimpl
def nanotrain_register_parallel(register):
    for cls in (
        ForgetsBiases,
        ForgetsInnerNorms,
        ForgetsInnerBiases,
        ForgetsLayerNormBiases,
        SumsOverData,
        SumsOverTheWorld,
        ForgetsStages,
        SumsHeadsAlone,
        SumsVectorsAlone,
        AveragesTables,
        KeepsItsFirstList,
        DropsWhatComesLater,
        FreezesWhatIsUnused,
        KeepsWhatWasUsed,
        LosesTheOddOne,
        CountsTheOddOneTwice,
        WantsPairs,
    ):
        register(twin(cls, provides={"gradient_sync"}, mesh_dims={"dp"}))
    for cls in (
        AddsBiasesOfFour,
        PlacesHeadsWhole,
        KeepsConstantsOfAllHeads,
        TakesTheFirstHeadsConstants,
        SplitsConstantsTwice,
    ):
        register(twin(cls, mesh_dims={"tp"}))


class KeepsConstantsOfAllHeads(Sliced):
    """Splits parameters that are PER_HEAD, and leaves their buffers as they are."""

    def __init__(self, config):
        super().__init__()

    def apply(self, part, placements, mesh):
        own = [
            (module, dict(module.named_buffers()))
            for _, module, found in tagged(part)
            if found.role is Role.PER_HEAD
        ]
        before = {name: placements[name] for name, _ in part.named_buffers()}
        part = super().apply(part, placements, mesh)
        for module, buffers in own:
            for key, buffer in buffers.items():
                setattr(module, key, buffer)
        placements.update(before)
        return part


class TakesTheFirstHeadsConstants(KeepsConstantsOfAllHeads):
    """Splits those, and has every rank take the first heads'."""

    def apply(self, part, placements, mesh):
        part = super(KeepsConstantsOfAllHeads, self).apply(part, placements, mesh)
        for name, _ in part.named_buffers():
            if "tp" in placements[name].sharded:
                placements[name] = attrs.evolve(placements[name], offset=(0,))
        return part


class SplitsConstantsTwice(KeepsConstantsOfAllHeads):
    """Splits those at both ends: ranks have the heads of others."""

    def apply(self, part, placements, mesh):
        part = super(KeepsConstantsOfAllHeads, self).apply(part, placements, mesh)
        for name, _ in part.named_buffers():
            here = placements[name]
            if "tp" in here.sharded:
                other = here.global_shape[0] - here.offset[0] - here.shape[0]
                placements[name] = attrs.evolve(here, offset=(other,))
        return part


@hookimpl
def nanotrain_register_schedule(register):
    for cls in (WantsEqualStages, WantsPairsOfLayers, WantsTwoLayersAStage, SaysWhatOthersHold):
        register(twin(cls, mesh_dims={"pp"}))
    for cls in (
        StopsAtSixteen,
        LosesTheSeventeenth,
        StopsAtAHundred,
        TakesSixteenInTurn,
        HoldsAll,
        PutsOffWeightGradients,
    ):
        register(twin(cls))
