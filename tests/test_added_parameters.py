"""A run whose wrapper adds parameters starts from weights of the model that lack them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from nanotrain_core.compose import compose
from nanotrain_core.errors import CheckpointError
from nanotrain_core.recipe import write_resolved
from nanotrain_core.testing import Case

PLUGINS = [str(Path(__file__).with_name("added_parameters.py"))]


def composed(wrapper, **options):
    """Return the parameters of a run on one rank by name."""
    parallel = [{"use": wrapper}] if wrapper else []
    case = Case("parallel", use=wrapper or "ddp", overrides={"parallel": parallel}, plugins=PLUGINS)
    run = compose(case.recipe(), case.registry(), **options)
    return {each.placement.name: each.parameter for each in run.placed}, run.recipe


@pytest.fixture
def weights(tmp_path):
    """A folder with the model's weights, each one above what it is initially."""
    parameters, recipe = composed("")
    save_file({n: p.detach() + 1 for n, p in parameters.items()}, tmp_path / "model.safetensors")
    (tmp_path / "model.toml").write_text(write_resolved(recipe))
    return tmp_path


def test_added_parameters_keep_their_initial_values_and_a_warning_counts_them(weights):
    """The reader's own exception had ended the run with a traceback."""
    initial, _ = composed("adapters")
    with capture_logs() as logs:
        found, _ = composed("adapters", weights=str(weights))
    added = {name for name in found if name.endswith(".scale")}
    assert len(added) == 2
    for name, parameter in found.items():
        assert torch.equal(parameter, initial[name] + (name not in added))
    (warning,) = [log for log in logs if log["event"].startswith("parameters that a wrapper added")]
    assert (warning["parameters"], warning["such_as"]) == (2, min(added))


def test_a_parameter_that_a_wrapper_has_renamed_is_refused(weights):
    with pytest.raises(CheckpointError, match=r"has norm\.weight, and the run has norm\.gain instead"):
        composed("renames", weights=str(weights))
