"""Loss and data: numbers that the host has anyway."""

from functools import partial

from nanotrain_core.api import Rule
from nanotrain_health.catalogue.common import ratio

of_loss = partial(ratio, group="loss", reduce="last")
of_data = partial(ratio, group="data", reduce="last")

LOSS = (
    of_loss(
        name="loss/ema",
        unit="nats",
        level="minimal",
        summary="exponential moving average of the training loss over steps, excluding values that are not "
        "finite",
    ),
    of_loss(
        name="loss/spike",
        level="minimal",
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
    of_loss(
        name="loss/perplexity",
        summary="exp of the next-token loss: the equivalent number of equally likely tokens",
    ),
    of_loss(
        name="validation/perplexity",
        summary="exp of the validation loss: the equivalent number of equally likely tokens",
    ),
    of_loss(
        name="validation/gap",
        unit="nats",
        summary="validation loss minus the average of the next-token training loss",
        rule=Rule(
            warn_above=1.0,
            high="validation loss is {value} nats above the training loss: the model learns its training "
            "data by heart, or the two are of different kinds",
        ),
    ),
)


def ignored(which: str) -> Rule:
    """Return the rule for the share of targets that the loss ignores."""
    return Rule(
        warn_above=0.2,
        bad_above=0.3,
        high=f"{{percent}} of the {which} targets are ignored: time is spent on tokens that teach nothing; "
        "pack sequences, or look at the mask",
    )


DATA = (
    of_data(
        name="data/effective_tokens",
        unit="tokens",
        level="minimal",
        cost="device",
        summary="tokens since the run's beginning that the loss does not ignore",
    ),
    of_data(
        name="data/tokens_per_update",
        unit="tokens",
        summary="tokens of one optimizer step, over all ranks",
    ),
    of_data(
        name="data/effective_tokens_per_update",
        unit="tokens",
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
    of_data(
        name="data/ignored",
        cost="device",
        summary="fraction of the training targets that the loss ignores",
        rule=ignored("training"),
    ),
    of_data(
        name="validation/ignored",
        summary="fraction of the validation targets that the loss ignores",
        rule=ignored("validation"),
    ),
    of_data(
        name="data/masked",
        cost="device",
        summary="fraction of the training targets that the loss ignores, of data with conversations: all but "
        "the assistant's words",
    ),
    of_data(
        name="validation/masked",
        summary="fraction of the validation targets that the loss ignores, of data with conversations",
    ),
    of_data(
        name="data/epochs",
        unit="epochs",
        summary="passes through the training data so far: the position in them",
    ),
    of_data(
        name="data/mixture/{source}",
        summary="fraction of the tokens so far from one source, for data that mix several",
    ),
)
