"""Loss and data: numbers that the host has anyway."""

from nanotrain_core.api import Metric, Rule
from nanotrain_health.catalogue.common import ratio

LOSS = (
    Metric(
        name="loss/ema",
        unit="nats",
        group="loss",
        level="minimal",
        reduce="last",
        summary="exponential moving average of the training loss over steps, excluding values that are not "
        "finite",
    ),
    ratio(
        name="loss/spike",
        group="loss",
        level="minimal",
        reduce="last",
        summary="the training loss over its average before this step",
        rule=Rule(
            warn_above=3,
            bad_above=10,
            high="the loss is {value} times its average: look at the batch, lower lr, or let the monitor "
            "guard go back to before it",
        ),
    ),
    ratio(
        name="loss/nonfinite",
        group="loss",
        level="minimal",
        reduce="max",
        summary="1 if the training loss is NaN or infinite",
        rule=Rule(
            bad_above=0,
            high="the loss is not a number: gradients or weights overflowed, so nothing is learned; go back "
            "to an older checkpoint with a lower lr, and look at the data",
        ),
    ),
    ratio(
        name="loss/perplexity",
        group="loss",
        reduce="last",
        summary="exp of the next-token loss: the equivalent number of equally likely tokens",
    ),
    ratio(
        name="validation/perplexity",
        group="loss",
        reduce="last",
        summary="exp of the validation loss: the equivalent number of equally likely tokens",
    ),
    Metric(
        name="validation/gap",
        unit="nats",
        group="loss",
        reduce="last",
        summary="validation loss minus the average of the next-token training loss",
        rule=Rule(
            warn_above=1.0,
            high="validation loss is {value} nats above the training loss: the model learns its training "
            "data by heart, or the two are of different kinds",
        ),
    ),
)

IGNORED = (
    "{value} of the {what} targets are ignored: time is spent on tokens that teach nothing; pack sequences, "
    "or look at the mask"
)

DATA = (
    Metric(
        name="data/effective_tokens",
        unit="tokens",
        group="data",
        level="minimal",
        reduce="last",
        cost="device",
        summary="tokens since the run's beginning that the loss does not ignore",
    ),
    Metric(
        name="data/tokens_per_update",
        unit="tokens",
        group="data",
        reduce="last",
        summary="tokens of one optimizer step, over all ranks",
    ),
    Metric(
        name="data/effective_tokens_per_update",
        unit="tokens",
        group="data",
        reduce="last",
        cost="device",
        summary="tokens of one optimizer step that the loss does not ignore",
    ),
    ratio(
        name="data/drift",
        group="data",
        summary="relative difference of an update's effective tokens from their average in the run",
        rule=Rule(
            warn_above=0.1,
            high="an update has {percent} more or fewer tokens than usual: steps weigh them differently; "
            "look at padding and at the end of the data",
        ),
    ),
    ratio(
        name="data/ignored",
        group="data",
        reduce="last",
        cost="device",
        summary="fraction of the training targets that the loss ignores",
        rule=Rule(
            warn_above=0.2,
            bad_above=0.3,
            high=IGNORED.replace("{value}", "{percent}").replace("{what}", "training"),
        ),
    ),
    ratio(
        name="validation/ignored",
        group="data",
        reduce="last",
        summary="fraction of the validation targets that the loss ignores",
        rule=Rule(
            warn_above=0.2,
            bad_above=0.3,
            high=IGNORED.replace("{value}", "{percent}").replace("{what}", "validation"),
        ),
    ),
    ratio(
        name="data/masked",
        group="data",
        reduce="last",
        cost="device",
        summary="fraction of the training targets that the loss ignores, of data with conversations: all but "
        "the assistant's words",
    ),
    ratio(
        name="validation/masked",
        group="data",
        reduce="last",
        summary="fraction of the validation targets that the loss ignores, of data with conversations",
    ),
    Metric(
        name="data/epochs",
        unit="epochs",
        group="data",
        reduce="last",
        summary="passes through the training data so far: the position in them",
    ),
    ratio(
        name="data/mixture/{source}",
        group="data",
        reduce="last",
        summary="fraction of the tokens so far from one source, for data that mix several",
    ),
)
