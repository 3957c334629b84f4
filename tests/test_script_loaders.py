"""What a script's loaders may yield, and what is said of one that yields something else."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from nanotrain_core import RuntimeEngine
from nanotrain_core.batch import Batch
from nanotrain_core.contracts import Monitor
from nanotrain_core.script import ScriptConfig

TOKENS = torch.arange(24).view(4, 6) % 11
PAIR = (TOKENS, (TOKENS + 1) % 11)


class Losses(Monitor):
    def __init__(self):
        self.trained = []

    def on_step(self, report):
        self.trained.append(report.loss)


def fit(loader, validation=None, steps=1, **config):
    torch.manual_seed(0)
    model, losses = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64)), Losses()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = RuntimeEngine(model, optimizer, ScriptConfig(**config), callbacks=[losses])
    engine.fit(loader, validation, steps=steps)
    return losses.trained


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


@pytest.mark.parametrize("extra", [{"begins": torch.zeros_like(TOKENS)}, {"whole": Batch(*PAIR)}])
def test_a_batch_of_packed_documents_is_refused(extra):
    """The model attended from one document to another."""
    told = f"the train_loader yields a Batch with {min(extra)}, which a script's model would not receive"
    with pytest.raises(TypeError, match=told):
        fit([Batch(*PAIR, **extra)])


def test_pairs_may_be_tuples_lists_or_batches():
    loader = DataLoader(list(zip(*PAIR, strict=True)), batch_size=4)  # collates into a list
    assert fit(loader) == fit([PAIR]) == fit([Batch(*PAIR)])
