"""A precision holds what the optimizer stores, in the dtypes it declares, and loses no run."""

from __future__ import annotations

import re

import attrs
import torch

from nanotrain_core.contracts import MasterWeight, Precision
from nanotrain_core.placement import Piece
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.parallel import traces
from nanotrain_core.testing.compare import assert_bitwise
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import Drive, drive, make_run

#: Largest relative error of a master weight after ``store``; narrow formats may keep 3 bits.
STORE_ERROR = 0.1
#: How far a run's loss may be from float32's, relative, over 20 steps of the tiny model.
BAND = 0.02

ADAMW = {"use": "adamw", "lr": 0.01, "clip_norm": 1.0}


def precision_of(case: Case) -> Precision:
    """Build the precision."""
    precision: Precision = case.build()
    return precision


@attrs.define(frozen=True, eq=False)
class Mastered:
    """A live parameter of a freshly initialised tiny model, and a master of it."""

    piece: Piece
    precision: Precision
    master: MasterWeight

    @property
    def name(self) -> str:
        return self.piece.name

    @property
    def weight(self) -> torch.Tensor:
        return self.piece.weight

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what the making of a master leaves of ``weight``."""
        copy = weight.to(self.weight.dtype, copy=True)
        self.precision.master(copy, self.piece)
        return copy


def masters_of(case: Case) -> list[Mastered]:
    """Return a new master of each parameter."""
    precision = precision_of(case)
    pieces = [Piece(p.parameter, p.placement) for p in make_run(case.alone(), {}).placed]
    return [Mastered(piece, precision, precision.master(piece.weight, piece)) for piece in pieces]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance in units of what is expected."""
    wanted = expected.double()
    return float(torch.dist(actual.double(), wanted) / wanted.norm())


@check("precision", since="0.1")
def parameters_have_the_declared_dtype(case: Case) -> None:
    """Every parameter of the built model has ``parameter_dtype``."""
    declared = precision_of(case).parameter_dtype
    wrong = {found.name: found.weight.dtype for found in masters_of(case) if found.weight.dtype != declared}
    assert not wrong, f"declared {declared}, but {wrong}"


@check("precision", since="0.1")
def storing_what_was_loaded_changes_nothing(case: Case) -> None:
    """``store(load())`` leaves the parameter and the master bitwise as they were."""
    for found in masters_of(case):
        weight, master = found.weight, found.master
        before = {"parameter": weight.clone(), **{k: v.clone() for k, v in master.state().items()}}
        master.store(master.load().clone())
        assert_bitwise({"parameter": weight, **master.state()}, before, f"{found.name} after store(load())")


@check("precision", since="0.1")
def stored_weights_reach_the_model(case: Case) -> None:
    """After ``store(x)``, ``load()`` is x as near as the format allows and the parameter is that, rounded.

    Rounded to its dtype; or, where masters round weights further when they are made, to what they leave
    alone.
    """
    for found in masters_of(case):
        name, weight, master = found.name, found.weight, found.master
        wanted = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.1
        master.store(wanted.to(master.load().dtype))
        kept = master.load()
        error = relative_error(kept, wanted)
        assert error <= STORE_ERROR, f"{name}: stored weights come back with a relative error of {error:.3g}"
        what = f"{name} after store"
        if torch.equal(found.rounded(kept), kept.to(weight.dtype)):
            assert_bitwise({"parameter": weight}, {"parameter": kept.to(weight.dtype)}, what)
            continue
        assert_bitwise({"parameter": weight}, {"parameter": found.rounded(weight)}, f"{what}, rounded again")
        error = relative_error(weight, kept)
        assert error <= STORE_ERROR, f"{what}: the parameter differs from it by {error:.3g} of it"


@check("precision", since="0.1")
def master_keeps_small_updates(case: Case) -> None:
    """A thousand updates of 2**-12 of a weight add up instead of being rounded away one by one."""
    one_of_all_layers = {re.sub(r"\d+", "", found.name): found for found in masters_of(case)}
    for found in one_of_all_layers.values():
        name, master = found.name, found.master
        start = torch.ones_like(master.load())
        master.store(start)
        for _ in range(1000):
            master.store(master.load() + 2.0**-12)
        moved = (master.load().double() - 1).mean().item() / (1000 * 2.0**-12)
        assert 0.9 < moved < 1.1, f"{name}: 1000 small updates moved the weight by {moved:.3g} of their sum"


@check("precision", since="0.1")
def loss_follows_float32(case: Case) -> None:
    """Over 20 steps of the tiny model, every loss is within 2% of the same run in float32."""
    changes = {"run": {"steps": 20}, "optimizer": ADAMW, "batch": {"microbatch": 4}}
    (narrow,) = traces(case.alone(), **changes)
    (wide,) = traces(case.alone(), **changes, precision={"use": "fp32"})
    for got, want in zip(narrow.reports, wide.reports, strict=True):
        relative = abs(got.loss / want.loss - 1)
        assert relative < BAND, f"loss {got.loss:.4f} at step {got.step}, float32 has {want.loss:.4f}"
    assert wide.reports[-1].loss < wide.reports[0].loss, "the float32 run does not learn: nothing was tested"


@check("precision", since="0.1")
def overflow_is_agreed_on(case: Case) -> None:
    """With an infinite gradient on one rank, all ranks see a norm that is not finite and skip together."""
    ranks: list[Drive] = run_ranks(drive, case.world_size, case, {}, [1.0], overflow_from=case.world_size - 1)
    norms, skipped = [r.norms[0] for r in ranks], [r.skipped[0] for r in ranks]
    assert all(skipped), f"skipped, by rank: {skipped}; norms {norms}"


@check("precision", since="0.1")
def loss_scale_reacts_to_overflow(case: Case) -> None:
    """A scale above 1 falls after an overflow; a scale of 1, which scales nothing, stays where it is."""
    scale = precision_of(case).loss_scale
    before = scale.value
    scale.update(True)
    if before > 1.0:
        assert 0 < scale.value < before, f"the scale went from {before} to {scale.value} after an overflow"
    else:
        assert scale.value == before, f"the scale went from {before} to {scale.value}"


@check("precision", since="0.1")
def loss_scale_can_be_put_back(case: Case) -> None:
    """After ``load_meta(meta())`` a new loss scale goes on exactly as the old one would."""
    import json

    old, new = precision_of(case).loss_scale, precision_of(case).loss_scale
    for skipped in (True, False, True, False):
        old.update(skipped)
    new.load_meta(json.loads(json.dumps(old.meta())))
    for skipped in (False, True, False):
        assert new.value == old.value, f"scale {new.value} after restoring, {old.value} without a break"
        old.update(skipped)
        new.update(skipped)
