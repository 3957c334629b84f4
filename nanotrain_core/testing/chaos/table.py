"""Repeats rows of the fault matrix, and formats the table of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from statistics import median

import attrs
from rich.table import Table

from nanotrain_core.testing.chaos.bench import Bench
from nanotrain_core.testing.chaos.matrix import NOT_RUN
from nanotrain_core.testing.chaos.row import Outcome, Row

COLUMNS = (
    *("row", "fault", "survived", "steps lost", "replay mism.", "sample errors", "false succ."),
    *("detect s", "recover s"),
)


@attrs.define
class Tried:
    """All repetitions of one row."""

    row: type[Row]
    outcomes: list[Outcome] = attrs.field(factory=list)

    @property
    def survived(self) -> int:
        return sum(not outcome.problems for outcome in self.outcomes)

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        all_of = self.outcomes
        return [
            self.row.number,
            self.row.name,
            f"{self.survived}/{len(all_of)}",
            str(max(outcome.steps_lost for outcome in all_of)),
            str(sum(outcome.replay_mismatches for outcome in all_of)),
            str(sum(outcome.sample_errors for outcome in all_of)),
            str(sum(outcome.false_successes for outcome in all_of)),
            _middle([outcome.detect_s for outcome in all_of]),
            _middle([outcome.recover_s for outcome in all_of]),
        ]


def _middle(seconds: Sequence[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    return f"{median(known):.1f}" if known else ""


def try_rows(
    bench: Bench, rows: Sequence[type[Row]], *, repeat: int, seed: int, tell: Callable[[str], None]
) -> list[Tried]:
    """Run each row ``repeat`` times; ``tell`` a line about each."""
    tried = []
    for row in rows:
        few = f"needs {row.least_ranks} ranks (--nproc)" if bench.settings.ranks < row.least_ranks else ""
        if why := few or row.not_here(bench):
            tell(f"{row.number:>4} {row.name}: not run here: {why}")
            continue
        tried.append(Tried(row))
        for number in range(repeat):
            random = Random(f"{seed}/{row.__name__}/{number}")
            outcome = row().run(bench, f"{row.__name__}-{number}", random)
            tried[-1].outcomes.append(outcome)
            tell(f"{row.number:>4} {row.name}: {'; '.join(outcome.problems) or 'survived'}")
    return tried


def table(tried: Sequence[Tried]) -> Table:
    """Return the table. Steps lost are the maximum of all repetitions, seconds the median."""
    drawn = Table()
    for name in COLUMNS:
        drawn.add_column(name, no_wrap=name == "fault")
    for row in tried:
        drawn.add_row(*row.cells(), style="" if row.survived == len(row.outcomes) else "red")
    return drawn


def markdown(tried: Sequence[Tried]) -> str:
    """Return the same as a Markdown table, with the reasons for rows that were not run."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(row.cells())} |" for row in tried]
    lines += ["", "Not run here:", ""]
    return "\n".join([*lines, *(f"- {what}: {why}." for what, why in NOT_RUN.items())])
