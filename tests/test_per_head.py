"""What has an entry for each head must be split with the heads beside it, and nothing else has to be."""

import pytest
from torch import nn

from nanotrain_core.errors import PluginError
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.placement import place
from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.run.validate_components import check_per_head

TP = Layout({"dense": View(("dp", "tp"), (1, 2))})


class Attention(nn.Module):
    """8 query heads of size 4, 1 key head, an entry for each query head, and a norm of a head's outputs."""

    def __init__(self, entries=8):
        super().__init__()
        self.q, self.k = (tag(nn.Linear(16, 4 * heads, bias=False), Role.COLUMN, unit=4) for heads in (8, 1))
        self.decay = tag(nn.Module(), Role.PER_HEAD)
        self.decay.weight = nn.Parameter(nn.Linear(1, entries).bias.detach())
        self.decay.register_buffer("slopes", self.decay.weight.detach().clone())
        self.decay.norm = tag(nn.LayerNorm(4), Role.INNER)


def split(part, *names):
    """Return placements with these split along tp, as by a wrapper."""
    placements = place([part], TP)
    return placements | {name: placements[name].split(0, "tp", 0, 2) for name in names}


QUERIES, DECAYS = "q.weight", ("decay.weight", "decay.slopes")


def test_a_module_inside_that_has_another_role_stays_whole():
    """Each rank applies a norm of one head to all of its own heads."""
    part = Attention()
    check_per_head([part], split(part, QUERIES, *DECAYS))


@pytest.mark.parametrize("missing", DECAYS)
def test_what_is_left_whole_beside_split_heads_is_refused(missing):
    part = Attention()
    others = (name for name in DECAYS if name != missing)
    with pytest.raises(PluginError, match=f"^{missing} has an entry for each head, and is whole along tp"):
        check_per_head([part], split(part, QUERIES, *others))


def test_an_entry_for_each_key_head_is_whole_where_key_heads_are():
    """Ranks use copies of the one key head: only query heads are split."""
    part = Attention(entries=1)
    check_per_head([part], split(part, QUERIES))


def test_of_a_number_that_is_no_column_s_all_heads_beside_it_count():
    part = Attention(entries=4)
    with pytest.raises(PluginError, match=r"^decay.weight has an entry"):
        check_per_head([part], split(part, QUERIES))
