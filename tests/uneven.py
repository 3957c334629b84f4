"""A corpus in which every sequence has another number of targets: averages over ranks would be wrong."""

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.builtin.configs import SyntheticConfig
from nanotrain_core.component import Component


@hookimpl
def nanotrain_register_data(register):
    factory = f"{__name__}:build"
    register(Component(name="uneven", config=SyntheticConfig, factory=factory, summary="for tests"))


def build(config):
    from nanotrain_core.batch import IGNORE
    from nanotrain_core.data.synthetic import Synthetic

    class Uneven(Synthetic):
        def train_batch(self, sequences, shard):
            batch = super().train_batch(sequences, shard)
            targets = batch.targets.clone()
            for row, tokens in zip(targets, batch.tokens, strict=True):
                row[: int(tokens[0]) % len(row)] = IGNORE
            return attrs.evolve(batch, targets=targets)

    return Uneven(config)
