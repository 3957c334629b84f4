"""Data that validates on what it trains on, or would with other options: see ``broken_twins.py``."""

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


class ValidatesOnTheBeginning(Synthetic):
    """Validation reads the first training sequences."""

    def read_sequences(self, numbers, *, validation):
        return super().read_sequences(numbers, validation=False)


class ValidatesOnOneOfThem(Synthetic):
    """One validation sequence is a training sequence."""

    def read_sequences(self, numbers, *, validation):
        found = super().read_sequences(numbers, validation=validation)
        if validation:
            found[numbers == 3] = super().read_sequences([5], validation=False)[0]
        return found


class TrainsOnWhatIsLeft(Synthetic):
    """Every seventh training sequence is one that validation should have for itself."""

    def read_sequences(self, numbers, *, validation):
        found = super().read_sequences(numbers, validation=validation)
        taken = [row for row, number in enumerate(numbers) if not validation and number % 7 == 0]
        held = [int(numbers[row]) // 7 % self.config.validation_sequences for row in taken]
        if taken:
            found[taken] = super().read_sequences(held, validation=True)
        return found


class FewTokens(Synthetic):
    """No fault: short sequences of four different tokens are in both splits by chance."""

    def read_sequences(self, numbers, *, validation):
        return super().read_sequences(numbers, validation=validation) % 4


@hookimpl
def nanotrain_register_data(register):
    for cls in (
        *(HoldsOutTheEnd, HoldsOutTheBeginning, HoldsOutEveryNth),
        *(ValidatesOnTheBeginning, ValidatesOnOneOfThem, TrainsOnWhatIsLeft, FewTokens),
    ):
        register(twin(cls, configs.SyntheticConfig))
