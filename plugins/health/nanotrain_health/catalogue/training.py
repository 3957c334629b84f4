"""Gradients, updates, weights and optimizer state: by layer, from a pass over all of them."""

from functools import partial

from nanotrain_core.api import Bins, Rule
from nanotrain_health.catalogue.common import from_tensors, over_weights, ratio

of_gradients = partial(over_weights, group="gradients")
of_updates = partial(over_weights, group="updates")
of_weights = partial(over_weights, group="weights")

SIZES = Bins(low=1e-12, high=1e4, count=64, log=True)


def first_last(what: str) -> Rule:
    """Return the rule for what the first layer gets over what the last one gets."""
    return Rule(
        warn_below=0.05,
        bad_below=0.01,
        low=f"{what} hardly reach the first layers: they are {{value}} of those of the last one; check norms "
        "and initialization, lower lr, or warm up for longer",
    )


GRADIENTS = (
    ratio(
        name="gradients/clip_coefficient",
        group="gradients",
        level="minimal",
        summary="factor that limits the norm of the gradient to clip_norm",
        rule=Rule(
            warn_below=0.1,
            bad_below=0.01,
            low="gradients are clipped to {value} of their size: lower lr or warm up for longer; if they are "
            "always as large, raise clip_norm",
        ),
    ),
    ratio(
        name="gradients/clipped",
        group="gradients",
        level="minimal",
        summary="1 if the gradient was clipped",
    ),
    ratio(
        name="gradients/clip_rate",
        group="gradients",
        summary="fraction of the last logged steps with a clipped gradient, once 100 of them are known",
    ),
    ratio(
        name="gradients/clip_mean",
        group="gradients",
        summary="mean factor of clipping over the last logged steps, once 100 of them are known",
        rule=Rule(
            warn_below=0.5,
            low="over the last 100 logged steps gradients were clipped to {value} of their size: a larger "
            "clip_norm or a lower lr would let them have their own size",
        ),
    ),
    of_gradients(name="gradients/norm/{block}", summary="norm of a layer's gradient, before clipping"),
    from_tensors(
        name="gradients/first_last",
        group="gradients",
        summary="norm of the first layer's gradient over the last one's",
        rule=first_last("gradients"),
    ),
    from_tensors(
        name="gradients/share/{block}",
        group="gradients",
        summary="norm of a layer's gradient over that of the median layer",
        rule=Rule(
            warn_below=1e-2,
            bad_below=1e-3,
            low="{where} is dead: its gradient is {value} times that of the median layer, so it learns "
            "nothing; check its initialization, its norms, and what is frozen",
        ),
    ),
    of_gradients(
        name="gradients/parameters/{statistic}/{parameter}",
        level="debug",
        summary="norm, mean, standard deviation of a parameter's gradient",
    ),
    of_gradients(
        name="gradients/histogram/{block}",
        kind="histogram",
        bins=SIZES,
        level="debug",
        summary="magnitudes of the elements of a layer's gradient",
    ),
)

TOO_SMALL = (
    "updates are {times} times too small: a step moves weights by {value} of their size; raise lr, or check "
    "clipping and what is frozen"
)
TOO_LARGE = (
    "updates are {times} times too large: a step moves weights by {value} of their size; lower lr, or warm "
    "up for longer"
)

UPDATES = (
    of_updates(
        name="updates/ratio",
        summary="true update: norm of the optimizer's change (of its float32 masters if it "
        "has them on the device) over the norm of the weights, in the monitored layers",
        rule=Rule(warn_above=0.3, bad_above=1.0, high=TOO_LARGE),
    ),
    of_updates(
        name="updates/ratio_at_full_lr",
        summary="updates/ratio scaled to the highest learning rate of the schedule",
        rule=Rule(warn_below=1e-4, bad_below=1e-6, low=TOO_SMALL),
    ),
    of_updates(
        name="updates/ratio/{block}",
        summary="true update of a layer: norm of its change over the norm of its weights",
    ),
    of_updates(
        name="updates/norm/{block}",
        summary="norm of the optimizer's change of a layer, in float32 masters if it has them",
    ),
    of_updates(
        name="updates/proxy",
        summary="lr x clipped gradient norm / weight norm, of the whole model: what plain gradient descent "
        "would change",
        rule=Rule(warn_above=0.3, bad_above=1.0, high=TOO_LARGE),
    ),
    of_updates(name="updates/proxy/{block}", summary="the proxy of a layer"),
    *(
        of_updates(name=f"updates/proxy_{name}", summary=f"{name} of the layers' proxies")
        for name in ("median", "p95", "max")
    ),
    from_tensors(
        name="updates/proxy_first_last",
        group="updates",
        summary="the first layer's proxy over the last one's",
        rule=first_last("updates"),
    ),
    of_updates(
        name="updates/parameters/ratio/{parameter}",
        level="debug",
        summary="true update of a parameter: norm of its change over its norm",
    ),
    of_updates(
        name="updates/parameters/norm/{parameter}",
        level="debug",
        summary="norm of a parameter's change",
    ),
)

WEIGHTS = (
    from_tensors(name="weights/norm", group="weights", cost="weights", summary="2-norm of all weights"),
    over_weights(name="weights/norm/{block}", group="weights", summary="2-norm of a layer's weights"),
    of_weights(
        name="weights/spread",
        summary="largest norm of a layer over the smallest",
        rule=Rule(
            warn_above=1000,
            high="weights of one layer are {value} times as large as those of another: check initialization "
            "and weight decay",
        ),
    ),
    of_weights(
        name="weights/parameters/{statistic}/{parameter}",
        level="debug",
        summary="norm, mean, standard deviation of a parameter",
    ),
    of_weights(
        name="weights/histogram/{block}",
        kind="histogram",
        bins=SIZES,
        level="debug",
        summary="magnitudes of the elements of a layer's weights",
    ),
)

OPTIMIZER = (
    over_weights(
        name="optimizer/nonfinite",
        group="optimizer",
        reduce="sum",
        summary="the optimizer's moments, as blocks of parameters, with elements that are not finite, in "
        "the monitored layers",
        rule=Rule(
            bad_above=0,
            high="{value} blocks of the optimizer's state are not finite: these weights are lost; go back "
            "to an older checkpoint",
        ),
    ),
    ratio(
        name="optimizer/skip_rate",
        group="optimizer",
        summary="fraction of the last 20 logged steps that were skipped, once 10 are known",
        rule=Rule(
            warn_above=0.35,
            bad_above=0.6,
            high="{percent} of the steps are skipped, since gradients overflow: lower lr; with fp16 take "
            "bf16, or look for activations beyond 65504",
        ),
    ),
)
