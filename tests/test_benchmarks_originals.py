"""Frameworks raced from a clone train the same sizes on as many tokens, and are asked for by name."""

import sys
from itertools import islice

import pytest
import torch

from benchmarks.__main__ import main, parse
from benchmarks.cases import ORIGINALS
from benchmarks.originals import CLONES
from benchmarks.ours import batches
from benchmarks.peer_nano_train import flags
from benchmarks.peer_picotron import Absent, Feed, stand_in

CASES = {case.name: case for case in ORIGINALS}


@pytest.mark.parametrize(
    ("names", "asked"),
    [(["originals"], ["nano-train", "picotron"]), (["picotron-tp2"], ["picotron"])],
)
def test_without_a_clone_the_command_says_what_to_clone(names, asked, capsys):
    with pytest.raises(SystemExit) as end:
        main(names)
    said = capsys.readouterr().err
    assert end.value.code != 0
    for name, original in CLONES.items():
        told = f"--{name} names no clone" in said and f"git clone {original.url}" in said
        assert told is (name in asked)


def test_a_folder_that_is_no_clone_is_refused_even_where_no_benchmark_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--picotron", str(tmp_path)])
    assert f"--picotron {tmp_path} has no train.py" in capsys.readouterr().err


def test_all_benchmarks_are_those_whose_clone_is_given(tmp_path):
    (tmp_path / "train.py").touch()
    assert parse([]).originals == []
    assert {case.clone for case in parse(["--picotron", str(tmp_path)]).originals} == {"picotron"}


def option(line, name):
    return line[line.index(name) + 1]


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("nano-train")])
def test_nano_train_steps_on_as_many_tokens_in_microbatches_as_large(name):
    recipe = CASES[name].recipe()
    lanes = recipe.topology.config.ep
    line = flags(recipe, recipe.batch.sequences // lanes)
    sequences = int(option(line, "--batch_size"))
    assert recipe.batch.sequences * recipe.batch.length == 1024
    assert sequences * lanes == 8
    if recipe.topology.config.pp > 1:
        assert sequences // int(option(line, "--num_microbatches")) == recipe.batch.microbatch == 2


def test_nano_train_shards_its_optimizer_where_ours_does():
    strategies = {name: "optim_grads" in flags(CASES[name].recipe(), 8) for name in CASES if "nano" in name}
    assert strategies == {name: "ep2" in name for name in strategies}


def test_picotron_is_fed_the_microbatches_of_our_side():
    recipe = CASES["picotron-dp2-tp2"].recipe()
    feed = Feed(recipe, rank=2)
    assert feed.grad_acc_steps == 2
    ours = [micro for step in islice(batches(recipe, 2), 2) for micro in step]
    for tokens, targets in ours:
        given = next(feed)
        assert torch.equal(given["input_ids"], tokens)
        assert torch.equal(given["target_ids"], targets)
        assert given["position_ids"].shape == tokens.shape


def test_a_module_that_is_stood_in_for_may_be_imported_from_and_not_called(monkeypatch):
    monkeypatch.setattr("benchmarks.peer_picotron.ABSENT", {"no_such_kernels": ("layers",)})
    monkeypatch.setattr(torch.cuda, "synchronize", torch.cuda.synchronize)
    stand_in()
    names = [name for name in sys.modules if name.startswith("no_such_kernels")]
    assert names == ["no_such_kernels", "no_such_kernels.layers"]
    assert all(isinstance(sys.modules.pop(name), Absent) for name in names)
    with pytest.raises(ImportError, match=r"no_such_kernels\.fast is called"):
        Absent("no_such_kernels").fast(1, dtype=None)
