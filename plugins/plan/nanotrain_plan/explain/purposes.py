"""What collectives are and what each is for, in words for readers who do not know the code."""

from __future__ import annotations

from nanotrain_plan.dry.origin import Origin
from nanotrain_plan.explain.owners import CORE

#: How the ranks of a group exchange tensors, by whether they compute on the host.
EXCHANGES = {
    False: "On GPUs they are those of {name}, which calls NCCL: devices send to one another, and the host "
    "does not wait for them.",
    True: "On CPUs they are those of {name}, which calls gloo: it sends through sockets, an all-gather as "
    "broadcasts and a reduce-scatter as an all-to-all whose parts each rank adds up.",
}

#: What the core's collectives and messages are for, by the qualified name of the calling function.
PURPOSES = {
    "AllReduceGradients.finish": "data ranks saw different sequences, and their gradients are added up.",
    "GlobalNorm.of": "each rank adds up the squares of its gradients, and the sum over ranks gives the norm "
    "of the whole model's gradient.",
    "StageP2P._wait_for": "in forward a stage needs the output of the stage before it, in backward the "
    "gradient of its own output.",
    "StageP2P.send": "in forward a stage passes its output to the next stage, in backward the gradient of "
    "its input to the one before.",
    "_ChunkedLoss.forward": "each rank has the logits of a part of the vocabulary, and the loss needs them "
    "all.",
    "balance_routers": "routers learn how many tokens each expert got in the whole batch.",
    "sum_over_data": "numbers that each rank knows of its own data, such as how many tokens count in the "
    "loss, are added up.",
}


def purpose(owner: str, origin: Origin) -> str:
    """Return what a collective is for, as a sentence after a colon; empty if nobody wrote anything about it.

    Of the core one of :data:`PURPOSES`. Of any other function what its author wrote, in quotation marks.
    """
    if owner == CORE and origin.name in PURPOSES:
        return PURPOSES[origin.name]
    return quoted(origin)


def quoted(origin: Origin | None) -> str:
    """Return what is written about a place in its source file, in quotation marks; empty if nothing is."""
    return f'"{origin.text}"' if origin is not None and origin.text else ""
