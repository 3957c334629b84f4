"""Every schedule passes the harness, on two ranks; ``-m full`` up to four, and beside data-parallel ones."""

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
UNTIED = {"model": {"layers": 12}}
TIED = {"model": {"layers": 12, "tied": True}, "parallel": [{"use": "summed"}]}  # two ranks have the table
GPT = {"norm": "layernorm", "activation": "gelu", "bias": True, "positions": "learned", "max_length": 16}


def case(use, topology, around, name="", **config):
    return Case(
        "schedule", use=use, config=SCHEDULES[use] | config, topology=topology, overrides=around, name=name
    )


#: The composition matrix trains every schedule in the first tier.
TRAINED_ELSEWHERE = ("gpipe", "interleaved_1f1b", "zb_h1")

test_conformance = conformance(
    *(case(use, {"pp": 2}, UNTIED) for use in SCHEDULES if use not in TRAINED_ELSEWHERE)
)
test_orders = conformance(
    *(case(use, {"pp": 2}, UNTIED) for use in TRAINED_ELSEWHERE),
    marks={"gradients_equal": pytest.mark.full},
)

test_exhaustively = pytest.mark.full(
    conformance(
        *(
            case(use, {"pp": pp}, around, f"{use}-pp{pp}-{tied}")
            for use, pp, (tied, around) in product(
                SCHEDULES, (1, 2, 3, 4), {"tied": TIED, "untied": UNTIED}.items()
            )
        ),
        *(case(use, {"dp": 2, "pp": 2}, TIED, f"{use}-dp2-pp2") for use in SCHEDULES),
        *(
            case(use, {"dp": 2, "pp": 2}, {**TIED, "model": {**GPT, "layers": 12}}, f"{use}-gpt")
            for use in SCHEDULES
        ),
        *(case("interleaved_1f1b", {"pp": pp}, TIED, f"v3-pp{pp}", v=3) for pp in (1, 2, 3, 4)),
    )
)
