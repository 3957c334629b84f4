"""A buffer that training changes would be lost at resume: the run is refused where it saves."""

import pytest
from examples_of_plugins import ALIBI, TP, example

from nanotrain_core.errors import PluginError
from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.probe import make_engine

TEXT = "buffer layers.0.alibi.slopes changed in training: make it a parameter with requires_grad=False"


def saved(case, folder, changes):
    """Return what a run says in which a buffer of the last rank is not what it was."""
    engine = make_engine(case, {"run": {"steps": 1}}, folder=folder)
    part = engine.run.stages[0]
    if changes and engine.run.mesh.rank == engine.run.mesh.world_size - 1:
        part.layers["0"].alibi.slopes.add_(1.0)
    try:
        engine.fit()
    except PluginError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(("changes", "told"), [(True, TEXT), (False, "saved")])
def test_a_buffer_that_changed_on_one_rank_is_refused_on_all(tmp_path, changes, told):
    case = example("model", "alibi", config=ALIBI, topology={"tp": 2}, overrides=TP)
    assert run_ranks(saved, 2, case, tmp_path, changes) == [told, told]
