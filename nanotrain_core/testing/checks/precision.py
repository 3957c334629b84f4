"""A precision keeps what the optimizer stores, in the dtypes it declares, and resumes exactly."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

from nanotrain_core.component import Support
from nanotrain_core.compose import Run
from nanotrain_core.contracts import MasterWeight, Precision
from nanotrain_core.layout.placement import RANGE, Piece
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.dtypes import kept_dtypes
from nanotrain_core.precision.gemm import TorchGEMM
from nanotrain_core.precision.quantized_storage import PackedWeight, Packing, dequantize, storage_key
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check, distributed
from nanotrain_core.testing.checks.optimizer import whole_of
from nanotrain_core.testing.compare import assert_bitwise, assert_same
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import Drive, Trace, drive, make_run, train

#: Largest relative error of a master weight after ``store``, unless its format itself rounds away more.
STORE_ERROR = 0.1
#: Numbers of elements that end in the middle of a row of a packed weight, and that do not.
ENDS = (1, RANGE - 1, RANGE, RANGE + 1, 3 * RANGE + RANGE // 2 + 5)
ADAMW = {"use": "adamw", "lr": 0.01, "clip_norm": 1.0}


def precision_of(case: Case) -> Precision:
    """Build the precision, and set it up as a run does before any other call."""
    precision: Precision = case.build()
    precision.setup(7, Passes(), TorchGEMM())
    return precision


@attrs.define(frozen=True, eq=False)
class Mastered:
    """A live parameter of a freshly initialized tiny model, and a master of it."""

    piece: Piece
    precision: Precision
    master: MasterWeight

    @property
    def name(self) -> str:
        return self.piece.name

    @property
    def weight(self) -> torch.Tensor:
        return self.piece.weight

    @property
    def form(self) -> tuple[Any, ...]:
        """Key of equivalent masters: their class, and the weight's class, dtype and shape."""
        return type(self.master), type(self.weight), self.weight.dtype, tuple(self.weight.shape)

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what creating a master leaves of ``weight``."""
        copy = weight.to(self.weight.dtype, copy=True)
        if isinstance(self.weight, PackedWeight):  # a master may go by how its weight is held
            copy = PackedWeight.of(copy, self.weight.packing)
        self.precision.master(copy, self.piece)
        return dequantize(copy)

    def format_error(self, wanted: torch.Tensor) -> float:
        """Return the relative error of `wanted` in the format of a packed weight; 0 for another weight."""
        if not isinstance(self.weight, PackedWeight):
            return 0.0
        copy = PackedWeight.of(wanted.to(self.weight.dtype), self.weight.packing)
        return 1.01 * relative_error(dequantize(copy), wanted)  # a master may round `wanted` once more


def masters_of(case: Case) -> list[Mastered]:
    """Return a new master of each parameter that this rank has, without frozen ones: they get none."""
    precision = precision_of(case)
    placed = made_run(case).placed
    pieces = [Piece(p.parameter, p.placement) for p in placed if p.parameter.requires_grad]
    return [Mastered(piece, precision, precision.master(piece.weight, piece)) for piece in pieces]


def made_run(case: Case) -> Run:
    """Return the case's run on this rank; of one process, without wrappers that have nothing to do."""
    return make_run(case if distributed(case) else case.alone(), {})


def on_each_rank(look: Callable[[Case], None], case: Case) -> None:
    """Call ``look`` on every rank of the case: of what is split or in stages each has something else."""
    if distributed(case):
        run_ranks(look, case.world_size, case)
    else:
        look(case)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance in units of the expected value."""
    wanted = expected.double()
    return float(torch.dist(actual.double(), wanted) / wanted.norm())


@check("precision", since="0.1")
def parameters_have_the_declared_dtype(case: Case) -> None:
    """Every matrix of the built model has ``parameter_dtype``; a vector (a norm's) that or a wider one.

    What a module keeps by ``keep_dtype`` has the dtype that it was built with.
    """
    on_each_rank(assert_declared_dtypes, case)


def assert_declared_dtypes(case: Case) -> None:
    """Check the parameters of this rank."""
    declared = precision_of(case).parameter_dtype
    run = made_run(case)
    kept = {name for stage in run.stages.values() for name in kept_dtypes(stage)}
    wrong = {
        placed.placement.name: dtype
        for placed in run.placed
        if (dtype := placed.parameter.dtype) != declared
        and not (len(placed.placement.global_shape) < 2 and _wider(dtype, declared))
        and placed.placement.name not in kept
    }
    assert not wrong, f"declared {declared}, but {wrong}"


def _wider(dtype: torch.dtype, than: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.promote_types(dtype, than) == dtype


@check("precision", since="0.1")
def storing_what_was_loaded_changes_nothing(case: Case) -> None:
    """``store(load())`` leaves the parameter and the master bitwise as they were."""
    on_each_rank(assert_unchanged, case)


def assert_unchanged(case: Case) -> None:
    """Store what the masters of this rank load."""
    for found in masters_of(case):
        weight, master = found.weight, found.master
        before = {"parameter": weight.clone(), **{k: v.clone() for k, v in master.state().items()}}
        master.store(master.load().clone())
        assert_bitwise({"parameter": weight, **master.state()}, before, f"{found.name} after store(load())")


@check("precision", since="0.1")
def stored_weights_reach_the_model(case: Case) -> None:
    """After ``store(x)``, ``load()`` is x as near as the format allows, and the parameter is that, rounded.

    Rounded to its dtype, to the nearest number or to the one on the other side, as stochastic rounding does;
    or, where masters round weights further when they are made, to what they leave alone. A format that is not
    rounded to its nearest number (``rounds_to_nearest``) may be twice as far.
    """
    on_each_rank(assert_stored, case)


def assert_stored(case: Case) -> None:
    """Store other weights in the masters of this rank, and look at its parameters."""
    nearest = case.supported("rounds_to_nearest") is Support.FULL
    for found in masters_of(case):
        name, weight, master = found.name, found.weight, found.master
        wanted = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.1
        far = max(STORE_ERROR, found.format_error(wanted)) * (1 if nearest else 2)
        master.store(wanted.to(master.load().dtype))
        kept = master.load()
        error = relative_error(kept, wanted)
        most = f"{error:.3g}, expected at most {far:.3g}"
        assert error <= far, f"{name}: stored weights come back with a relative error of {most}"
        what = f"{name} after store"
        if torch.equal(found.rounded(kept), kept.to(weight.dtype)):
            _assert_neighbor(weight, kept, what)
            continue
        assert_bitwise({"parameter": weight}, {"parameter": found.rounded(weight)}, f"{what}, rounded again")
        error = relative_error(weight, kept)
        most = f"{error:.3g} of it, expected at most {far:.3g}"
        assert error <= far, f"{what}: the parameter differs from it by {most}"


def _assert_neighbor(weight: torch.Tensor, kept: torch.Tensor, what: str) -> None:
    """Check that each value is one of the two of its dtype nearest to the stored one."""
    nearest = kept.to(weight.dtype)
    step = 2 * torch.finfo(weight.dtype).eps  # to the next number, relative to a power of two below
    wide, exact = dequantize(weight).double(), kept.double()
    gap = (nearest.double().abs() * step).clamp(min=float(torch.finfo(weight.dtype).tiny) * step)
    other = (wide != nearest.double()) & (wide - exact).abs().lt(gap)
    other &= (wide - exact).sign() == -(nearest.double() - exact).sign()
    wrong = (wide != nearest.double()) & ~other
    at = int(wrong.flatten().int().argmax())
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} weights are no rounding of what is kept; element "
        f"{at} is {wide.flatten()[at]:.8g} for {exact.flatten()[at]:.8g}"
    )


@check("precision", since="0.2")
def plain_masters_are_what_they_store(case: Case) -> None:
    """Where a master is ``plain``, that is the storage ``load`` returns, and ``store`` copies it as it is."""
    on_each_rank(assert_plain, case)


def assert_plain(case: Case) -> None:
    """Write to the plain masters of this rank, and compare."""
    for found in masters_of(case):
        plain = found.master.plain
        if plain is None:
            continue
        master, weight = plain
        loaded = found.master.load()
        same = [(master, loaded), (weight, found.weight)]
        assert all(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in same), (
            f"{found.name}: plain is neither what load() returns nor the weight it was made of"
        )
        loaded.detach().copy_(torch.randn(loaded.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
        found.master.store(loaded)
        assert_bitwise(
            {"parameter": weight}, {"parameter": master.to(weight.dtype)}, f"{found.name} after store"
        )


@check("precision", since="0.2")
def packed_weights_keep_what_is_written(case: Case) -> None:
    """Values of a packed weight's format are restored bit by bit, from all rows, one, and part of one."""
    weights = [placed.parameter for placed in make_run(case.alone(), {}).placed]
    packed = {storage_key(weight): weight for weight in weights if isinstance(weight, PackedWeight)}
    for form, weight in packed.items():
        for count in ENDS:
            numbers = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(weight.dtype)
            _assert_kept(weight.packing, numbers, f"packing {form!r}, {count} weights")


def _assert_kept(packing: Packing, numbers: torch.Tensor, what: str) -> None:
    rounded = packing.rounded(numbers).to(numbers.dtype)
    again = packing.rounded(rounded).to(numbers.dtype)
    assert_same({"numbers": again}, {"numbers": rounded}, f"{what}, rounded a second time", atol=0.0)
    rows = packing.pack(rounded)
    shape = (-(-len(numbers) // RANGE), packing.width)
    assert (tuple(rows.shape), rows.dtype) == (shape, torch.uint8), (
        f"{what}: pack returns {tuple(rows.shape)} of {rows.dtype}, expected {shape} of torch.uint8"
    )
    found = packing.unpack(rows)
    assert tuple(found.shape) == (len(rows) * RANGE,), (
        f"{what}: unpack returns {tuple(found.shape)} of {len(rows)} rows, expected ({len(rows) * RANGE},)"
    )
    assert_bitwise({"numbers": found[: len(numbers)]}, {"numbers": rounded}, f"{what}, packed and unpacked")
    alone = torch.cat([packing.unpack(rows[at : at + 1]) for at in range(len(rows))])
    assert_bitwise({"numbers": alone}, {"numbers": found}, f"{what}, unpacked row by row")


@check("precision", since="0.1", promise="keeps_small_updates")
def master_keeps_small_updates(case: Case) -> None:
    """A thousand updates of 2**-12 of a weight, one in a step, add up instead of being rounded away."""
    on_each_rank(assert_updates_add_up, case)


def assert_updates_add_up(case: Case) -> None:
    """Update the masters of this rank, one of each form."""
    one_of_a_form = {found.form: found for found in masters_of(case)}
    for found in one_of_a_form.values():
        name, master = found.name, found.master
        start = torch.ones_like(master.load())
        master.store(start)
        for _ in range(1000):
            master.store(master.load() + 2.0**-12)
            found.precision.loss_scale.update(False)  # a step ends: rounding may be keyed by their number
        moved = (master.load().double() - 1).mean().item() / (1000 * 2.0**-12)
        assert 0.9 < moved < 1.1, f"{name}: 1000 small updates moved the weight by {moved:.3g} of their sum"


@check("precision", since="0.2")
def resume_is_bit_equal(case: Case) -> None:
    """Stopped after 2 of 4 steps and resumed from the checkpoint, weights and masters end bitwise equal."""
    # AdamW has state to resume; an optimizer that the case names may be what shards, and has its own.
    changes = {"run": {"steps": 4}, "optimizer": case.overrides.get("optimizer", ADAMW)}
    with tempfile.TemporaryDirectory() as name:
        options: dict[str, Any] = {"folder": Path(name), "save_at": 2}
        through: list[Trace] = run_ranks(train, case.world_size, case, changes, **options)
        resumed: list[Trace] = run_ranks(train, case.world_size, case, changes, **options, resume="2")
    for rank, (one, other) in enumerate(zip(through, resumed, strict=True)):
        got, want = (whole_of(trace) for trace in (other, one))
        assert_bitwise(
            got, want, f"rank {rank}, resumed after step 2 of 4: is all of a master in its state()?"
        )


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
    """After ``load_meta(meta())`` a new loss scale continues exactly as the old one would."""
    import json

    old, new = precision_of(case).loss_scale, precision_of(case).loss_scale
    for skipped in (True, False, True, False):
        old.update(skipped)
    new.load_meta(json.loads(json.dumps(old.meta())))
    for skipped in (False, True, False):
        assert new.value == old.value, f"scale {new.value} after restoring, {old.value} without a break"
        old.update(skipped)
        new.update(skipped)
