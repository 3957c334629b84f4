"""Divides matrices among the ranks that hold their parts: each orthogonalizes a share of them, made whole.

One all-to-all brings the parts of a matrix to its owner, another brings back the parts of its update. Both
carry as many elements as a rank has, whatever the number of ranks, and no matrix is computed twice. The idea
is that of the distributed Muon of Liu et al., arXiv 2502.16982, section 2.3, which gathers whole matrices on
all ranks that have parts of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from heapq import heapreplace
from itertools import zip_longest
from math import prod
from typing import Any

import attrs
import torch

from nanotrain_core.api import Shape, Span
from nanotrain_core.api.torch import Mesh, Piece
from nanotrain_muon import MuonConfig
from nanotrain_muon.assumed import OtherRanks
from nanotrain_muon.matrices import Box, Matrix, Survey
from nanotrain_muon.newton_schulz import flops, orthogonalize, scale_of

#: Elements of matrices that a rank makes whole at once, or those of one larger matrix: 128 MiB in float32.
ROUND = 2**25

#: How far beyond its share of FLOPs a rank may own matrices of which it has most, to receive less.
SLACK = 1.05


def assign(
    work: Mapping[Matrix, int], held: Sequence[Mapping[Matrix, int]]
) -> tuple[dict[Matrix, int], list[int]]:
    """Return the owner of each matrix, and the work of each rank.

    The largest come first, each to the rank with least work; or to the one that has more of it than that
    rank, if its work stays within its share.

    Args:
        work: FLOPs of each matrix.
        held: for each rank, the elements it has of each matrix.

    >>> assign({"a": 4, "b": 2, "c": 2}, [{"b": 1, "c": 1}, {"a": 1, "b": 1}])
    ({'a': 1, 'b': 0, 'c': 0}, [4, 4])
    """
    most: dict[Matrix, int] = {}
    for rank, elements in enumerate(held):
        for matrix, number in elements.items():
            if matrix not in most or number > held[most[matrix]][matrix]:
                most[matrix] = rank
    limit, loads = SLACK * sum(work.values()) / len(held), [0] * len(held)
    least = [(0, rank) for rank in range(len(held))]
    owners = {}
    for matrix in sorted(work, key=lambda each: (-work[each], each)):
        while least[0][0] != loads[least[0][1]]:  # grew since
            heapreplace(least, (loads[least[0][1]], least[0][1]))
        rank, holder = least[0][1], most[matrix]
        if loads[holder] + work[matrix] <= limit and held[holder][matrix] > held[rank].get(matrix, 0):
            rank = holder
        owners[matrix] = rank
        loads[rank] += work[matrix]
    return owners, loads


class Stack:
    """Matrices of equal shape, or equal when transposed, that are orthogonalized together."""

    def __init__(self, rows: int, columns: int) -> None:
        """``rows``: at most ``columns``."""
        self.shape = rows, columns
        self.matrices: list[Matrix] = []
        self.tall: list[bool] = []
        """Which of them are transposed."""
        self.scales: list[float] = []

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for it."""
        return like.new_empty(len(self.matrices), *self.shape)


def stacks_of(matrices: Sequence[Matrix], shapes: Mapping[str, Shape], scale: str) -> list[Stack]:
    """Return matrices in stacks of equal shape."""
    stacks: dict[tuple[int, int], Stack] = {}
    for matrix in matrices:
        rows, columns = shapes[matrix.name][-2:]
        shape = min(rows, columns), max(rows, columns)
        stack = stacks.setdefault(shape, Stack(*shape))
        stack.matrices.append(matrix)
        stack.tall.append(rows > columns)
        stack.scales.append(scale_of(scale, rows, columns))
    return list(stacks.values())


@attrs.define(frozen=True)
class Place:
    """A box of a matrix that this rank owns."""

    box: Box
    stack: int
    index: int
    tall: bool

    def of(self, stacks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return it in the rows and columns of the parameter, a view."""
        row, column, rows, columns = self.box
        matrix = stacks[self.stack][self.index]
        return (matrix.mT if self.tall else matrix)[row : row + rows, column : column + columns]


class Messages:
    """The parts of matrices that one rank sends each other one, or receives, in the order of their ranks."""

    def __init__(self, ranks: int) -> None:
        self.places: list[Any] = []
        """Parts of gradients, or places in stacks."""
        self.boxes: list[Box] = []
        self.sizes = [0] * ranks
        """Elements, by rank."""

    def add(self, rank: int, box: Box, place: Any) -> None:
        """Add one; ranks in their order."""
        self.places.append(place)
        self.boxes.append(box)
        self.sizes[rank] += box[2] * box[3]

    def buffer(self, like: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return memory for all of them, and for each, in its shape."""
        flat = like.new_empty(sum(self.sizes))
        parts = torch.split(flat, [rows * columns for _, _, rows, columns in self.boxes])
        return flat, [part.view(box[2:]) for part, box in zip(parts, self.boxes, strict=True)]


#: Waits for parts of matrices.
Arrival = Callable[[], Sequence[torch.Tensor]]


class Round:
    """Matrices that the ranks of a span own, :data:`ROUND` elements each, from their gradients to updates."""

    def __init__(
        self,
        span: Span,
        owned: Sequence[Sequence[Matrix]],
        senders: Senders,
        survey: Survey,
        config: MuonConfig,
    ) -> None:
        """``owned``: by each rank of the span, in the order of the process group. Collective over it."""
        self.steps, self.exchange = config.ns_steps, survey.mesh.exchange_of(span)
        rank, ranks = survey.mesh.rank, survey.layout.members(survey.mesh.rank, span)
        me, held = ranks.index(rank), survey.held[span]
        mine = {(part.matrix, part.box): part for part in survey.parts}
        self.stacks = stacks_of(owned[me], survey.shapes, config.scale)
        self.scales = [
            torch.tensor(stack.scales, dtype=torch.float64).view(-1, 1, 1).to(survey.mesh.device)
            for stack in self.stacks
        ]
        self.sent, self.arriving, self.leaving, self.returned = (Messages(len(ranks)) for _ in range(4))
        for owner, matrices in enumerate(owned):
            for matrix in matrices:
                for box in held[rank].get(matrix, ()):
                    self.returned.add(owner, box, mine[matrix, box])
                    if senders.of(matrix, box, owner) == me:
                        self.sent.add(owner, box, mine[matrix, box])
        place_of = {
            matrix: (number, index, stack.tall[index])
            for number, stack in enumerate(self.stacks)
            for index, matrix in enumerate(stack.matrices)
        }
        for number, other in enumerate(ranks):
            for matrix in owned[me]:  # the order in which others send them
                for box in held[other].get(matrix, ()):
                    place = Place(box, *place_of[matrix])
                    self.leaving.add(number, box, place)
                    if senders.of(matrix, box, me) == number:
                        self.arriving.add(number, box, place)

    def send(self, gradients: Sequence[torch.Tensor], like: torch.Tensor) -> Arrival:
        """Begin to bring the parts of matrices to their owners, in the dtype of ``like``."""
        parts = [part.of(gradients, like) for part in self.sent.places]
        return self._exchanged(parts, self.sent, self.arriving, like)

    def receive(self, arrival: Arrival, like: torch.Tensor) -> list[torch.Tensor]:
        """Return what this rank owns, in stacks. What has arrived is of no use afterwards."""
        stacks = [stack.tensor(like) for stack in self.stacks]
        copy([place.of(stacks) for place in self.arriving.places], arrival())
        return stacks

    def orthogonalize(self, stacks: list[torch.Tensor]) -> None:
        """Replace the matrices in stacks by their updates."""
        for number, scales in enumerate(self.scales):  # one after the other is freed
            stacks[number] = orthogonalize(stacks[number], self.steps).mul_(scales)

    def give_back(self, updates: Sequence[torch.Tensor], like: torch.Tensor) -> Arrival:
        """Begin to bring the parts of updates to the ranks that hold them."""
        parts = [place.of(updates) for place in self.leaving.places]
        return self._exchanged(parts, self.leaving, self.returned, like)

    def write(
        self, parts: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], like: torch.Tensor
    ) -> None:
        """Put updates that have arrived in the place of gradients."""
        copy([part.of(gradients, like) for part in self.returned.places], parts)

    def _exchanged(
        self, parts: Sequence[torch.Tensor], there: Messages, here: Messages, like: torch.Tensor
    ) -> Arrival:
        if self.exchange is None:
            return lambda: parts
        (sent, into), (received, found) = there.buffer(like), here.buffer(like)
        copy(into, parts)
        pending = self.exchange.all_to_all(received, sent, here.sizes, there.sizes, async_op=True)

        def arrived() -> Sequence[torch.Tensor]:
            pending()
            return found

        return arrived


def copy(into: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors: one kernel for all that lie alike, as torch takes one each if any two do not."""
    for alike in (True, False):
        pairs = zip(into, tensors, strict=True)
        chosen = [(to, x) for to, x in pairs if (to.stride() == x.stride()) is alike]
        if chosen:
            torch._foreach_copy_([to for to, _ in chosen], [x for _, x in chosen])


class Senders:
    """Which rank sends a box to the owner of its matrix, of those that hold it."""

    def __init__(self, held: Sequence[Mapping[Matrix, Sequence[Box]]]) -> None:
        """``held``: by each rank of a span, in the order of the process group."""
        self.holders: dict[tuple[Matrix, Box], list[int]] = defaultdict(list)
        for number, boxes in enumerate(held):
            for matrix, some in boxes.items():
                for box in some:
                    self.holders[matrix, box].append(number)

    def of(self, matrix: Matrix, box: Box, owner: int) -> int:
        """Return the index of the rank that sends it: the owner itself, or the next holder after it."""
        holders = self.holders[matrix, box]
        return holders[bisect_left(holders, owner) % len(holders)]


def rounds_of(matrices: Sequence[Matrix], shapes: Mapping[str, Shape]) -> list[list[Matrix]]:
    """Return what a rank owns in rounds, those of equal shape together."""
    rounds: list[list[Matrix]] = []
    size = 0
    for matrix in sorted(matrices, key=lambda each: (sorted(shapes[each.name][-2:]), each)):
        elements = prod(shapes[matrix.name][-2:])
        if not rounds or size + elements > ROUND:
            rounds.append([])
            size = 0
        rounds[-1].append(matrix)
        size += elements
    return rounds


class Orthogonalizer:
    """Orthogonalizes this rank's matrices together with all ranks that hold parts of them."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        dtypes: Iterable[torch.dtype],
        mesh: Mesh,
        config: MuonConfig,
        others: OtherRanks | None = None,
    ) -> None:
        """Divide the work. Collective over the world.

        Args:
            pieces: of this rank's matrices, in the order of gradients.
            dtypes: of its masters; a rank without any receives in those of others.
            mesh: of the run.
            config: of the optimizer.
            others: what is assumed of other ranks if they cannot be asked.

        Raises:
            NanotrainError: the ranks of a stage do not have all of a matrix.
        """
        survey = Survey(pieces, mesh, share=config.share_replicas, others=others)
        masters = {dtype for theirs in mesh.gather({*dtypes}) for dtype in theirs}
        self.dtype, self.mesh = reduce(torch.promote_types, masters, torch.float32), mesh
        if config.ns_dtype == "bfloat16" or (config.ns_dtype == "auto" and mesh.device_is_async):
            self.dtype = torch.bfloat16
        self.rounds: list[Round] = []
        self.flops: dict[Span, list[int]] = {}
        """Of each rank of a span, in a step."""
        for span in sorted(survey.held):
            shapes, held = (
                survey.shapes,
                [survey.held[span][r] for r in survey.layout.members(mesh.rank, span)],
            )
            work = {m: config.ns_steps * flops(*shapes[m.name][-2:]) for each in held for m in each}
            elements = [{m: sum(b[2] * b[3] for b in boxes) for m, boxes in each.items()} for each in held]
            senders = Senders(held)
            owners, self.flops[span] = assign(work, elements)
            owned: list[list[Matrix]] = [[] for _ in held]
            for matrix, owner in owners.items():
                owned[owner].append(matrix)
            for some in zip_longest(*(rounds_of(each, shapes) for each in owned), fillvalue=[]):
                self.rounds.append(Round(span, some, senders, survey, config))

    def __call__(self, gradients: Sequence[torch.Tensor]) -> None:
        """Replace gradients by updates, in place. While one round is computed, the next one is sent."""
        if not self.rounds:
            return
        like = torch.empty(0, dtype=self.dtype, device=self.mesh.device)
        arriving: Arrival | None = self.rounds[0].send(gradients, like)
        returning = deque[tuple[Round, Arrival]]()
        for each, following in zip(self.rounds, (*self.rounds[1:], None), strict=True):
            assert arriving is not None  # of this round
            stacks = each.receive(arriving, like)
            arriving = None  # frees its messages
            if following is not None:
                arriving = following.send(gradients, like)
            each.orthogonalize(stacks)
            returning.append((each, each.give_back(stacks, like)))
            del stacks
            if len(returning) > 1 or following is None:
                self._write(returning, gradients, like)
        self._write(returning, gradients, like)

    def _write(
        self,
        returning: deque[tuple[Round, Arrival]],
        gradients: Sequence[torch.Tensor],
        like: torch.Tensor,
    ) -> None:
        if returning:
            each, arrival = returning.popleft()
            each.write(arrival(), gradients, like)
