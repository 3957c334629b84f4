"""Data whose fingerprint leaves out an option that says what is held out: see ``broken_twins.py``."""

from broken_twins import twin

from nanotrain_core import hookimpl
from nanotrain_core.builtin import configs
from nanotrain_core.data.synthetic import Synthetic


class HoldsOutTheEnd(Synthetic):
    """Of one stream of sequences the last are held out: with fewer for training, others."""

    def open(self, *, length, seed):
        super().open(length=length, seed=seed)
        self.fingerprint = f"{self.config.vocab} tokens, sequences of {length}, seed {seed}"

    def read_sequences(self, numbers, *, validation):
        of_all = [self.place(int(number), validation) for number in numbers]
        return super().read_sequences(of_all, validation=False)

    def place(self, number, validation):
        return number + self.config.sequences if validation else number


class HoldsOutTheBeginning(HoldsOutTheEnd):
    """The first are held out."""

    def place(self, number, validation):
        return number if validation else number + self.config.validation_sequences


class HoldsOutEveryNth(HoldsOutTheEnd):
    """Every n-th is held out, with n from the two numbers."""

    def place(self, number, validation):
        every = 1 + self.config.sequences // self.config.validation_sequences
        return number * every if validation else number + number // (every - 1) + 1


@hookimpl
def nanotrain_register_data(register):
    for cls in (HoldsOutTheEnd, HoldsOutTheBeginning, HoldsOutEveryNth):
        register(twin(cls, configs.SyntheticConfig))
