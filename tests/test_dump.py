"""Dumps have the tensors of one process, under the same names, whatever the layout."""

import pytest
import torch
from nanotrain_inspect import dump
from safetensors.torch import load_file
from test_looking import FOUR

from nanotrain_core.errors import NanotrainError
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import make_engine, train

MODULES = ["layers.1", "embed", "norm"]
WHAT = ["weights", "gradients", "updates", "activations"]


ADAMW = {"use": "adamw", "lr": 0.01, "clip_norm": 0.5}


def fit(folder, case, optimizer=ADAMW, at_once=4000, **config):
    dump.AT_ONCE = at_once  # several rounds, rows of a tensor apart
    monitor = [{"use": "dump", "steps": "1:2", "what": WHAT, "modules": MODULES, **config}]
    changes = {"run": {"steps": 2}, "monitor": monitor, "optimizer": optimizer}
    make_engine(case, changes, folder=folder).fit()


@pytest.mark.full
def test_on_eight_ranks_with_zero_they_are_those_of_one_process(tmp_path):
    """Over pp, tp with sequence parallelism, dp, ep, and gradients that ranks hold ranges of."""
    case = FOUR.case()
    run_ranks(fit, case.world_size, tmp_path / "eight", case, FOUR.optimizers()["adamw"])
    run_ranks(fit, 1, tmp_path / "one", case.alone())
    for step in (1, 2):
        for what in WHAT[:3]:
            file = f"dumps/step-{step:08}/{what}.safetensors"
            ours, alone = load_file(tmp_path / "eight" / file), load_file(tmp_path / "one" / file)
            assert {name.partition(".")[0] for name in alone} == {"layers", "embed", "norm"}
            assert_same(ours, alone, f"{what} of step {step}", atol=1e-9)
            assert all(name.startswith(tuple(MODULES)) for name in ours)


@pytest.mark.full
def test_they_are_what_the_run_had(tmp_path):
    """Against the harness's own copies: gradients of the first step, and weights after the last."""
    case = Case("parallel", use="ddp", topology={"dp": 2})
    run_ranks(fit, 2, tmp_path, case, modules=["*"])
    changes = {"run": {"steps": 2}, "optimizer": ADAMW}
    traces = run_ranks(train, 2, case, changes)
    first, second = (tmp_path / "dumps" / f"step-{n:08}" for n in (1, 2))
    gradients = whole([trace.gradients for trace in traces])
    assert_same(load_file(first / "gradients.safetensors"), gradients, "gradients", atol=1e-12)
    before, update = (load_file(second / f"{name}.safetensors") for name in ("weights", "updates"))
    after = {name: before[name] + update[name] for name in before}
    assert_same(after, whole([trace.weights for trace in traces]), "weights", atol=1e-12)


@pytest.mark.full
def test_activations_are_those_of_each_rank_and_microbatch(tmp_path):
    case = Case("parallel", use="ddp", topology={"dp": 2})
    run_ranks(fit, 2, tmp_path, case, modules=["layers.1"])
    run_ranks(fit, 1, tmp_path / "alone", case.alone(), modules=["layers.1"])
    ours, alone = (
        load_file(folder / "dumps" / "step-00000001" / "activations.safetensors")
        for folder in (tmp_path, tmp_path / "alone")
    )
    rows = torch.cat([t for name, t in sorted(ours.items()) if name.startswith("layers.1@rank")])
    expected = torch.cat([t for name, t in sorted(alone.items()) if name.startswith("layers.1@rank")])
    assert {name.partition("@")[2].partition(".")[0] for name in ours} == {"rank0", "rank1"}
    assert_same({"": rows}, {"": expected}, "sequences in the batch's order", atol=1e-12)


def test_more_than_the_recipe_allows_stops_the_run_before_it_is_gathered(tmp_path):
    with pytest.raises(NanotrainError, match=r"weights of step 1 are \d+\.\d MB, and most_mb = 0.001"):
        fit(tmp_path, Case("parallel", use="ddp"), most_mb=0.001)
    assert not (tmp_path / "dumps").exists()


def test_activations_of_more_than_the_recipe_allows_are_not_kept(tmp_path, monkeypatch):
    """Every output of every microbatch was copied before their size was compared."""
    look, seen, kept = dump.Dump.look, [], []

    def looking(self, name, output):
        look(self, name, output)
        seen.append(output.nbytes)
        kept.append(sum(each.nbytes for each in self.returned.values()))

    monkeypatch.setattr(dump.Dump, "look", looking)
    most = 0.05
    with pytest.raises(NanotrainError, match="activations of step 1 are") as stopped:
        fit(tmp_path, Case("parallel", use="ddp"), most_mb=most, what=["activations"], modules=["*"])
    assert sum(seen) > 2 * most * 1e6 > 2 * max(kept)
    assert f" {sum(seen) / 1e6:.1f} MB" in str(stopped.value)
    assert not (tmp_path / "dumps").exists()


def test_a_module_that_is_nowhere_is_told_with_the_nearest(tmp_path):
    with pytest.raises(NanotrainError, match=r"in a module 'layer\.1' \(did you mean 'layers\.1"):
        fit(tmp_path, Case("parallel", use="ddp"), modules=["layer.1"])
