"""Which rank computed wrongly: the first difference in the order of computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import attrs
import torch

from nanotrain_core.api.torch import Computed

#: Place in the order of computation over all stages, and a description: (0 forward or 1 backward, position of
#: the stage in that pass, number on the rank, text).
Key = tuple[int, int, int, str]
Hashes = Mapping[Key, torch.Tensor]


@attrs.define(frozen=True)
class Report:
    """What one rank computed, twice."""

    counterparts: tuple[int, ...]
    host: str
    first: Mapping[Key, int]
    again: Mapping[Key, int]


def order_of(computed: Computed, number: int) -> Key:
    """Return the place of a tensor in the order of computation, where ``number`` were yielded before it."""
    stage = -computed.stage if computed.backward else computed.stage
    return int(computed.backward), stage, number, f"the {computed.what} of stage {computed.stage}"


def blame(reports: Sequence[Report]) -> str:
    """Return which tensor differs first, and on which ranks.

    A later difference may be a consequence of an earlier one. Ranks whose results were added up, as those of
    tensor parallelism, deviate together.
    """
    for key in sorted({key for report in reports for key in report.first}):
        wrong = {rank for rank, report in enumerate(reports) if _deviates(rank, key, reports)}
        if wrong:
            return _sentence(key, sorted(wrong), reports)
    return "what was replayed has other bits than at first, and no rank differs from the others any more"


def _values(rank: int, key: Key, reports: Sequence[Report]) -> list[int]:
    return [run[key] for run in (reports[rank].first, reports[rank].again) if key in run]


def _deviates(rank: int, key: Key, reports: Sequence[Report]) -> bool:
    """Return whether a value of ``rank`` differs from the majority of its counterparts' values and its own.

    Without a majority all of them deviate. False for a rank of another stage, which does not compute ``key``.
    """
    own = _values(rank, key, reports)
    if not own:
        return False
    votes = Counter(v for other in reports[rank].counterparts for v in _values(other, key, reports))
    (usual, most), *others = votes.most_common(2)
    no_majority = bool(others) and others[0][1] == most
    return no_majority or any(value != usual for value in own)


def _sentence(key: Key, wrong: Sequence[int], reports: Sequence[Report]) -> str:
    who = ", ".join(f"{rank} ({reports[rank].host})" for rank in wrong)
    whom = f"rank {who}" if len(wrong) == 1 else f"one of ranks {who}"
    passing = any(len({*_values(rank, key, reports)}) > 1 for rank in wrong)
    again = "computed again, its bits are others" if passing else "computed again, they are the same"
    compared = max(len(reports[rank].counterparts) for rank in wrong)
    with_whom = f"compared on {compared} replicas" if compared > 1 else "compared with itself"
    return f"{key[3]} of a replayed microbatch is wrong on {whom}: {with_whom}; {again}"
