"""What a script's loaders may yield, and what is said of one that yields something else."""

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from nanotrain_core import RuntimeEngine
from nanotrain_core.batch import Batch
from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.gradients import AllReduceGradients
from nanotrain_core.script import ScriptConfig
from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.probe import rank

TOKENS = torch.arange(24).view(4, 6) % 11
PAIR = (TOKENS, (TOKENS + 1) % 11)


class Losses(Monitor):
    def __init__(self):
        self.trained = []

    def on_step(self, report):
        self.trained.append(report.loss)


def make(**config):
    torch.manual_seed(0)
    model, losses = nn.Sequential(nn.Embedding(64, 8), nn.Dropout(0.1), nn.Linear(8, 64)), Losses()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return RuntimeEngine(model, optimizer, ScriptConfig(**config), callbacks=[losses]), losses.trained


def fit(loader, validation=None, steps=1, **config):
    """Return the losses of a script that calls fit once."""
    engine, losses = make(**config)
    engine.fit(loader, validation, steps=steps)
    return losses


def data(rows=16):
    """Return rows that are all different."""
    tokens = torch.arange(2 * rows).view(rows, 2)
    return TensorDataset(tokens, tokens)


@pytest.mark.parametrize(
    ("item", "found"),
    [
        ((*PAIR, torch.ones(4, 6)), r"a tuple of 3 \(Tensor, Tensor, Tensor\)"),
        ([TOKENS], r"a list of 1 \(Tensor\)"),
        ((TOKENS, None), r"a tuple of 2 \(Tensor, NoneType\)"),
        (TOKENS[:2], "a Tensor"),
        ({"input_ids": TOKENS, "labels": TOKENS}, "a dict"),
    ],
)
def test_a_loader_of_anything_but_two_tensors_is_refused(item, found):
    """A mask in third place was lost; two rows of a tensor became inputs and their targets."""
    told = (
        rf"yields {found}: expected two tensors \(inputs, targets\), or a Batch; targets .* are IGNORE, -100"
    )
    with pytest.raises(TypeError, match="the train_loader " + told):
        fit([item])
    with pytest.raises(TypeError, match="the val_loader " + told):
        fit([PAIR], [item])


@pytest.mark.parametrize("extra", [{"document_starts": torch.zeros_like(TOKENS)}, {"whole": Batch(*PAIR)}])
def test_a_batch_of_packed_documents_is_refused(extra):
    """The model attended from one document to another."""
    told = f"the train_loader yields a Batch with {min(extra)}, which a script's model would not receive"
    with pytest.raises(TypeError, match=told):
        fit([Batch(*PAIR, **extra)])


def test_pairs_may_be_tuples_lists_or_batches():
    pairs = list(zip(*PAIR, strict=True))
    loader = DataLoader(pairs, batch_size=4, generator=torch.Generator())  # collates into a list
    assert fit(loader) == fit([PAIR]) == fit([Batch(*PAIR)])


def test_a_generator_of_a_batch_samplers_sampler_is_restored(tmp_path):
    """A resumed run had gone on with other batches."""

    def loader():
        sampler = RandomSampler(data(), generator=torch.Generator().manual_seed(5))
        return DataLoader(data(), batch_sampler=BatchSampler(sampler, 4, drop_last=False))

    straight = fit(loader(), steps=14)
    assert fit(loader(), steps=6, folder=tmp_path) == straight[:6]
    assert fit(loader(), steps=14, folder=tmp_path, resume="auto") == straight[6:]


def two_calls(folder, both=True, generator=None, first=4):
    """Run a script whose first call of fit ends with a pass over its loader, if it has four steps."""
    engine, losses = make(folder=folder, save_every=2, keep=9, resume="auto")
    own = torch.Generator().manual_seed(5) if generator else None
    engine.fit(DataLoader(data(16), batch_size=4, shuffle=True, generator=own), steps=first)
    if both:
        torch.rand(3)  # as of a script that splits its data at random
        engine.fit(DataLoader(data(24), batch_size=4, shuffle=True, generator=own), steps=8)
    return losses


@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("first", [3, 4])
def test_a_script_resumed_between_two_calls_of_fit_goes_on_as_without_a_stop(tmp_path, generator, first):
    """The repeated first call began another pass, to know how many tokens a batch has."""
    straight = two_calls(tmp_path / "straight", generator=generator, first=first)
    two_calls(tmp_path / "stopped", both=False, generator=generator, first=first)
    assert two_calls(tmp_path / "stopped", generator=generator, first=first) == straight[first:]


def test_a_seed_that_a_callback_sets_when_training_begins_counts():
    """Also if the first batch was read before, to know its size."""

    class Seeds(Monitor):
        def on_start(self, run):
            torch.manual_seed(3)

    drawn = []
    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64))
    model.register_forward_pre_hook(lambda *_: drawn.append(torch.rand(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=4, shuffle=True)
    RuntimeEngine(model, optimizer, callbacks=[Seeds()]).fit(loader, steps=1)
    torch.manual_seed(3)
    assert torch.equal(drawn[0], torch.rand(2))


def test_evaluating_more_often_changes_no_order_that_a_shared_generator_gives():
    """A loader draws from its generator whenever it is iterated, also if it does not shuffle."""

    def losses(every):
        own = torch.Generator().manual_seed(5)
        loader = DataLoader(data(), batch_size=4, shuffle=True, generator=own)
        return fit(loader, DataLoader(data(), batch_size=8, generator=own), steps=10, evaluate_every=every)

    assert losses(every=1) == losses(every=0)


@pytest.mark.parametrize("once", [iter, lambda batches: (pair for pair in batches)])
def test_a_validation_loader_that_can_be_iterated_only_once_is_refused(once):
    """Every evaluation but the first had silently been left out."""
    with pytest.raises(
        NanotrainError, match=r"the val_loader is a .*, which can be iterated only once: each"
    ):
        fit([PAIR], once([PAIR]))


class Stream(IterableDataset):
    """Shuffles by the number of the pass, as streaming datasets of Hugging Face do."""

    def __init__(self):
        self.epoch, self.seen = 0, []

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for row in torch.randperm(8, generator=torch.Generator().manual_seed(self.epoch)).tolist():
            self.seen.append(row)
            yield data(8)[row]


class Unknown(IterableDataset):
    """Does not say how many rows it has."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from data(self.rows)


def evaluate_unevenly():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = RuntimeEngine(model, optimizer, gradient_sync=AllReduceGradients())
    unevenly = DataLoader(Unknown(4), batch_size=4 - 2 * rank())
    with pytest.raises(
        NanotrainError, match=r"of ranks \[0\] ended after 1 batches, and those of the other ranks have more"
    ):
        engine.fit([PAIR], unevenly, steps=1)
    engine.fit([PAIR], DataLoader(Unknown(4), batch_size=2), steps=2)


def test_ranks_of_which_some_run_out_of_validation_batches_are_told_so():
    """Gloo aborted them: only loaders that knew their numbers of batches were compared."""
    run_ranks(evaluate_unevenly, 2)


def test_a_dataset_is_told_the_number_of_each_pass(tmp_path):
    """Every pass had the same order."""
    stream, again = Stream(), Stream()
    straight = fit(DataLoader(stream, batch_size=4), steps=5)
    passes = [
        torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).tolist() for epoch in range(3)
    ]
    assert stream.seen == [*passes[0], *passes[1], *passes[2][:4]]
    fit(DataLoader(Stream(), batch_size=4), steps=3, folder=tmp_path)
    assert fit(DataLoader(again, batch_size=4), steps=5, folder=tmp_path, resume="auto") == straight[3:]
    assert again.seen == stream.seen[8:]
