"""A text opened as data, or what is said against it."""

import pytest

from nanotrain_core.batch import Shard
from nanotrain_core.builtin.configs import TextConfig
from nanotrain_core.data.text import Text
from nanotrain_core.errors import DataError

WHOLE = Shard()


def opened(*paths, length=8, seed=3, **options):
    data = Text(TextConfig(paths=tuple(map(str, paths)), **options))
    data.open(length=length, seed=seed)
    return data


def refusal(*paths, **options):
    with pytest.raises(DataError) as error:
        opened(*paths, **options)
    return str(error.value)


def validation(data, sequences=4):
    batches = []
    while (batch := data.validation_batch(len(batches), sequences, WHOLE)) is not None:
        batches.append(batch)
    return batches
