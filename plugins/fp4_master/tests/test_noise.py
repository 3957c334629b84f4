"""Random numbers that are the same on every layout, and blocks that lie on one rank."""

import re

import pytest
import torch
from nanotrain_fp4_master.noise import Clock, Noise, cut_blocks, elements_of, mix, uniform
from pieces import LAYOUT, master_of, numbers
from torch import nn

from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.placement import Piece, Placement

SHAPE = (8, 6, 32)
CPU = torch.device("cpu")


def piece(placement, span=None):
    return Piece(nn.Parameter(torch.zeros(placement.shape)), placement, span)


def split(shape, *axes, ranks=2):
    """Yield the placements of all blocks of a tensor that is cut along ``axes``."""
    found = [Placement.whole("w", shape, LAYOUT)]
    for axis, dim in zip(axes, ("tp", "dp"), strict=False):
        found = [each.split(axis, dim, index, ranks) for each in found for index in range(ranks)]
    return found


@pytest.mark.parametrize("axes", [(), (0,), (1,), (2,), (0, 2), (1, 2), (0, 1)])
@pytest.mark.parametrize("cuts", [None, (0, 64, 256, 320)])
def test_every_element_knows_its_place_in_the_whole_tensor(axes, cuts):
    whole = torch.arange(8 * 6 * 32).view(SHAPE)
    for placement in split(SHAPE, *axes):
        wanted = whole[placement.slices].flatten()
        spans = [None] if cuts is None else [*zip(cuts, [*cuts[1:], len(wanted)], strict=True)]
        for span in spans:
            first, last = span or (0, len(wanted))
            found = elements_of(piece(placement, span), 0, last - first, CPU)
            assert torch.equal(found, wanted[first:last])
            assert torch.equal(elements_of(piece(placement, span), 3, 9, CPU), found[3:9])


def straddles(placement, span, block):
    """Return the same as ``cut_blocks`` the long way: some block is neither all here nor all elsewhere."""
    total = torch.Size(placement.global_shape).numel()
    here = torch.zeros(total, dtype=torch.bool)
    length = span[1] - span[0] if span else torch.Size(placement.shape).numel()
    elements = elements_of(piece(placement, span), 0, length, CPU)
    here[elements] = True
    here = torch.nn.functional.pad(here, (0, -total % block), value=bool(here[-1])).view(-1, block)
    in_order = (elements[1:] > elements[:-1]).all() and elements[0] % block == 0
    return bool((here.any(dim=1) & ~here.all(dim=1)).any()) or not in_order


@pytest.mark.parametrize("shape", [(8, 64), (6, 32), (4, 24), (10, 7), (4, 6, 32)])
@pytest.mark.parametrize("block", [16, 64])
def test_blocks_that_would_lie_on_two_ranks_are_found_and_no_others(shape, block):
    """A range is refused with all others of its parameter's part, if any block of that is cut."""
    seen = set()
    for axes in [(), (0,), (1,), (len(shape) - 1,)]:
        if any(shape[axis] % 2 for axis in axes):
            continue
        for placement in split(shape, *axes):
            size = torch.Size(placement.shape).numel()
            spans = [None, *((a, b) for a in range(0, size, 64) for b in {*range(a + 64, size, 64), size})]
            for span in spans:
                cut = straddles(placement, span, block) or straddles(placement, None, block)
                assert cut_blocks(piece(placement, span), block) == cut, (placement, span)
                seen.add(cut)
    assert seen == ({False} if all(size % 32 == 0 for size in shape[-1:]) and block == 16 else {False, True})


@pytest.mark.parametrize(
    ("shape", "axis", "block", "cut"),
    [((64, 64), 0, 64, False), ((64, 64), 1, 64, True), ((64, 64), 1, 16, False), ((3, 10), 1, 16, True)],
)
def test_tensor_parallel_blocks_are_refused_where_they_cut_a_scale(shape, axis, block, cut):
    placement = split(shape, axis)[1]
    assert cut_blocks(piece(placement), block) is cut
    value = numbers(*placement.shape)
    form = "nf4" if block == 64 else "nvfp4"
    if not cut:
        master_of(value, form, "naive", placement=placement)
        return
    with pytest.raises(NanotrainError, match=rf"w: blocks of {block} weights.*precision\.keep = \[\"w\"\]"):
        master_of(value, form, "naive", placement=placement)


@pytest.mark.parametrize(
    ("shape", "axis", "ranks", "form", "nearest"),
    [
        ((64, 64), 1, 8, "nvfp4", "4 in place of 8 ranks along its axis 1"),
        ((64, 128), 1, 4, "nf4", "2 in place of 4 ranks along its axis 1; or precision.block_size = 32"),
        ((8, 24), 0, 8, "nvfp4", "4 in place of 8 ranks along its axis 0"),
        ((4, 6, 32), 1, 6, "nf4", "3 in place of 6 ranks along its axis 1; or precision.block_size = 32"),
        ((3, 5, 7), 0, 3, "nvfp4", "1 in place of 3 ranks along its axis 0"),
    ],
)
def test_a_split_that_cuts_a_scale_is_refused_with_the_nearest_that_does_not(
    shape, axis, ranks, form, nearest
):
    placement = Placement.whole("w", shape, LAYOUT).split(axis, "tp", 1, ranks)
    wanted = rf"w: blocks of .* on several ranks: .*{re.escape(nearest)}.*; or to keep it, precision\.keep = "
    with pytest.raises(NanotrainError, match=wanted):
        master_of(numbers(*placement.shape), form, "residual", placement=placement)
    fewer = int(nearest.split()[0])
    for index in range(fewer):
        whole = Placement.whole("w", shape, LAYOUT)
        whole = whole.split(axis, "tp", index, fewer) if fewer > 1 else whole
        assert not cut_blocks(piece(whole), {"nvfp4": 16, "nf4": 64}[form])


@pytest.mark.parametrize("variant", ["remainder", "residual", "eco", "naive"])
def test_without_blocks_no_split_is_refused(variant):
    for placement in (*split((6, 10), 1), *split((6, 10), 0)):
        master_of(numbers(*placement.shape), "bf16", variant, placement=placement)


def test_numbers_are_spread_evenly_and_follow_no_neighbor():
    found = uniform(torch.arange(2**18), key=12345).double()
    assert found.min() >= 0
    assert found.max() < 1
    counts = torch.histc(found, bins=64, min=0, max=1)
    chi_squared = ((counts - 4096) ** 2 / 4096).sum()
    assert 30 < chi_squared < 110  # 63 degrees of freedom: outside with a chance of 1e-4
    for lag in (1, 2, 16, 64):
        pair = torch.stack((found[:-lag], found[lag:]))
        assert torch.corrcoef(pair)[0, 1].abs() < 0.01


def test_the_hash_is_splitmix64():
    """The first numbers of the published generator, started at 1234567."""
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + golden * step) % 2**64 for step in (1, 2, 3)]
    signed = torch.tensor([state - 2**64 if state >= 2**63 else state for state in states])
    found = [number % 2**64 for number in mix(signed).tolist()]
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_numbers_differ_between_seeds_steps_parameters_and_turns():
    seen = []
    for seed, step, name in [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")]:
        clock = Clock()
        clock.seed, clock.step = seed, step
        noise = Noise(piece(Placement.whole(name, (4, 64), LAYOUT)), clock, CPU)
        for _ in range(2):
            noise.begin()
            seen += [noise.weights(0, 256), noise.blocks(0, 256, 1)]
    for number, one in enumerate(seen):
        for other in seen[:number]:
            assert (one == other).float().mean() < 0.02


@pytest.mark.parametrize(("form", "variant"), [("nvfp4", "eco"), ("nf4", "residual"), ("bf16", "eco")])
def test_pieces_of_a_parameter_round_as_the_whole_does(form, variant):
    """In ranges, and in blocks of rows or columns, over several steps."""
    value, updates = numbers(64, 128), [numbers(64, 128, seed=s, scale=1e-3) for s in range(4)]

    def trained(placement, span):
        own = value[placement.slices]
        precision, master = master_of(own, form, variant, placement=placement, span=span, seed=3)
        for update in updates:
            mine = update[placement.slices].reshape(-1)
            mine = mine.view(own.shape) if span is None else mine[slice(*span)]
            master.store(master.load() + mine)
            precision.loss_scale.update(skipped=False)
        return master.weight.reshape(-1)

    whole = trained(Placement.whole("w", (64, 128), LAYOUT), None).view(64, 128)
    for placement in (*split((64, 128), 0), *split((64, 128), 1), *split((64, 128), 0, 1)):
        wanted = whole[placement.slices].flatten()
        for span in (None, (0, 64), (64, 1024), (1024, len(wanted))):
            first, last = span or (0, len(wanted))
            assert torch.equal(trained(placement, span), wanted[first:last])
