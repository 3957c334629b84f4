"""Every schedule passes the harness, on two and four ranks, and beside data-parallel ones."""

from itertools import product

import pytest

from nanotrain_core.testing import Case, conformance

SCHEDULES = {
    "gpipe": {},
    "1f1b": {},
    "interleaved_1f1b": {"v": 2},
    "zb_h1": {},
    "dualpipe_v": {},
}
TIED = {"model": {"tied": True}, "parallel": [{"use": "ddp"}]}  # the table is on two ranks

test_conformance = conformance(
    *(Case("schedule", use=use, config=config, topology={"pp": 2}) for use, config in SCHEDULES.items()),
    *(Case("schedule", use=use, topology={"pp": 4}, overrides=TIED) for use in ("1f1b", "zb_h1")),
)

test_exhaustively = pytest.mark.full(
    conformance(
        *(
            Case(
                "schedule",
                use=use,
                config=config,
                topology={"pp": pp},
                overrides=model,
                name=f"{use}-pp{pp}-{tied}",
            )
            for (use, config), pp, (tied, model) in product(
                SCHEDULES.items(), (1, 2, 3, 4), {"tied": TIED, "untied": {}}.items()
            )
        ),
    )
)
