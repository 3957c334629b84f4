"""How the catalogue writes its declarations."""

from functools import partial

from nanotrain_core.api import Metric

#: A plain number that the host has, or derives from reduced ones.
ratio = partial(Metric, unit="1")
#: Steps from one in which `health` reads tensors to the next: in every logged step that would cost about
#: 10% of a step of `laptop`.
TENSORS_EVERY = 40
#: Of each monitored layer, or of each of its norms.
at_layers = partial(Metric, unit="1", cost="layers", every=TENSORS_EVERY)
#: Of all gradients, weights or optimizer state.
over_weights = partial(Metric, unit="1", cost="weights", every=TENSORS_EVERY)
#: What follows from those.
from_tensors = partial(ratio, every=TENSORS_EVERY)
