"""``sharded_v2`` passes the harness: alone and over data ranks; exhaustively, written at once, too."""

import pytest

from nanotrain_core.testing import Case, conformance

SUMMED = {"parallel": [{"use": "summed"}]}

test_conformance = conformance(
    Case("checkpoint", use="sharded_v2", topology={"dp": 2}, overrides=SUMMED),
    # test_killed.py kills saves too.
    marks=dict.fromkeys(
        (
            "damage_is_noticed[empty]",
            "falls_back_over_a_damaged_one[empty]",
            "falls_back_over_a_damaged_one[truncated]",
            "killed_rank_leaves_the_last[first]",
            "killed_rank_leaves_the_last[last]",
            "interrupted_save_leaves_the_last[killed]",
            "due_on_all_ranks_alike",
            "resumed_twice_is_the_same_run",
            "steps_are_numbers",
        ),
        pytest.mark.full,
    ),
)

test_exhaustively = pytest.mark.full(
    conformance(
        Case("checkpoint", use="sharded_v2"),
        Case("checkpoint", use="sharded_v2", topology={"dp": 4}, overrides=SUMMED),
        Case("checkpoint", use="sharded_v2", config={"asynchronous": False}, name="at_once"),
        *(
            Case(
                "checkpoint",
                use="sharded_v2",
                config={"asynchronous": False},
                topology={"dp": dp},
                overrides=SUMMED,
                name=f"at_once-w{dp}",
            )
            for dp in (2, 4)
        ),
    )
)
