"""Schedules that heed what they should not, with one deliberate fault each: see ``broken_twins.py``."""

from broken_twins import twin

from nanotrain_core import hookimpl
from nanotrain_core.pipeline.actions import parts_between
from nanotrain_core.testing.components.gpipe import Staged

# --- plans of an earlier call --------------------------------------------------------------------------


class KeepsItsFirstPlan(Staged):
    """Keeps its lists by the number of ranks alone."""

    def __init__(self, config):
        del config
        self.plans = {}

    def actions(self, pp, microbatches):
        return self.plans.setdefault(pp, super().actions(pp, microbatches))


class NeverPlansForFewer(KeepsItsFirstPlan):
    """Makes new lists for more microbatches than ever, and gives those for fewer, too."""

    def actions(self, pp, microbatches):
        most = self.plans[pp] = max(microbatches, self.plans.get(pp, 0))
        return super(KeepsItsFirstPlan, self).actions(pp, most)


class GoesOnFromItsLastPlan(KeepsItsFirstPlan):
    """Puts the microbatches that its last plan had first behind the new ones."""

    def actions(self, pp, microbatches):
        known = self.plans.get(pp, 0)
        self.plans[pp] = microbatches
        lists = super(KeepsItsFirstPlan, self).actions(pp, microbatches)
        return tuple(
            tuple(sorted(mine, key=lambda action: (action.kind == "B", action.microbatch < known)))
            for mine in lists
        )


# --- costs that decide whether stages exist --------------------------------------------------------------


class RefusesDearHeads(Staged):
    """Refuses a head that is half of the model."""

    def __init__(self, config):
        del config

    def parts(self, costs, pp):
        if costs.head > sum(costs.layers):
            raise ValueError("the head is dearer than all layers")
        return super().parts(costs, pp)


class RefusesWhatIsUneven(RefusesDearHeads):
    """Refuses costs that no cut of consecutive layers balances."""

    def parts(self, costs, pp):
        fair = (sum(costs.layers) + costs.head + costs.embedding) / pp
        if pp > 1 and max(costs.layers) > 1.5 * fair:
            raise ValueError(f"a layer costs {max(costs.layers)}, and a stage {fair}")
        return super(RefusesDearHeads, self).parts(costs, pp)


class JoinsCheapStages(RefusesDearHeads):
    """Cuts no more stages than there are fair shares of the dearest piece."""

    def parts(self, costs, pp):
        dearest = max(costs.embedding, *costs.layers, costs.head)
        stages = min(pp, max(1, int(costs.total / dearest)))
        layers = len(costs.layers)
        if layers < pp:
            raise ValueError(f"{layers} layers are not for {pp} ranks")
        return parts_between([layers * stage // stages for stage in range(stages + 1)], range(stages))


@hookimpl
def nanotrain_register_schedule(register):
    for cls in (
        KeepsItsFirstPlan,
        NeverPlansForFewer,
        GoesOnFromItsLastPlan,
        RefusesDearHeads,
        RefusesWhatIsUneven,
        JoinsCheapStages,
    ):
        register(twin(cls, mesh_dims={"pp"}))
