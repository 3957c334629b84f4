"""The metrics of every run, from the reports of its steps, evaluations and checkpoints. Torch-free."""

from __future__ import annotations

from nanotrain_core.metrics.declared import Metric, Rule

#: Declarations of the metrics that the core itself publishes.
CORE = (
    Metric(
        name="loss",
        unit="nats",
        group="loss",
        level="minimal",
        summary="the training loss: weighted sum of the terms, each a mean over its global count",
        rule=Rule(
            high="the loss is not a number: gradients or weights overflowed; lower lr or look at the data"
        ),
    ),
    Metric(
        name="losses/{term}",
        unit="nats",
        group="loss",
        summary="one term of the loss, its unweighted mean",
    ),
    Metric(
        name="grad_norm",
        unit="1",
        group="gradients",
        level="minimal",
        summary="2-norm of the whole gradient, before clipping",
        rule=Rule(
            warn_below=1e-2,
            warn_above=1e2,
            bad_above=1e3,
            low="gradients are very small: raise lr, or check that the loss reaches all layers",
            high="gradients are very large: lower lr or clip_norm, or warm up for longer",
        ),
    ),
    Metric(
        name="lr", unit="1", group="optimizer", level="minimal", reduce="last", summary="the learning rate"
    ),
    Metric(
        name="loss_scale",
        unit="1",
        group="optimizer",
        reduce="last",
        summary="factor of the loss before backward; 1 except for float16",
    ),
    Metric(
        name="skipped",
        unit="1",
        group="optimizer",
        reduce="max",
        summary="1 if the step was skipped because its gradient was not finite",
    ),
    Metric(
        name="tokens",
        unit="tokens",
        group="data",
        level="minimal",
        reduce="last",
        summary="tokens since the run's beginning, including resumed parts",
    ),
    Metric(
        name="phase",
        unit="1",
        group="data",
        reduce="last",
        summary="index of the recipe's phase in which the step was taken, from 0",
    ),
    Metric(
        name="tokens_per_second",
        unit="tokens/s",
        group="speed",
        level="minimal",
        reduce="last",
        summary="tokens per second over all ranks, since the last logged step",
    ),
    Metric(
        name="seconds",
        unit="s",
        group="time",
        level="minimal",
        reduce="last",
        summary="time of one step, mean since the last logged step",
    ),
    Metric(
        name="expert_load",
        unit="1",
        group="moe",
        reduce="max",
        cost="device",
        summary="tokens of the busiest expert over the mean, in the worst layer",
    ),
    Metric(
        name="bubble",
        unit="1",
        group="pipeline",
        summary="fraction of a step in which ranks waited for other stages; not if the host never waits",
    ),
    Metric(
        name="validation/loss",
        unit="nats",
        group="loss",
        level="minimal",
        summary="mean next-token loss over the validation batches; without one, the weighted sum of terms",
    ),
    Metric(
        name="validation/losses/{term}",
        unit="nats",
        group="loss",
        summary="one other term of the loss over the validation batches, its unweighted mean",
    ),
    Metric(
        name="validation/bits_per_byte",
        unit="bits",
        group="loss",
        summary="next-token validation loss in bits per byte of the text, if tokens are text",
    ),
    Metric(
        name="validation/seconds",
        unit="s",
        group="time",
        reduce="last",
        summary="time of an evaluation on rank 0",
    ),
    Metric(
        name="checkpoint/seconds",
        unit="s",
        group="reliability",
        reduce="last",
        summary="time from the beginning of a save until it was in place",
    ),
    Metric(
        name="checkpoint/blocked",
        unit="s",
        group="reliability",
        reduce="last",
        summary="time for which training waited for a save",
    ),
)
