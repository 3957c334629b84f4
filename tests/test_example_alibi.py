"""The example ``alibi``: per-head constants and buffers of a model on every layout."""

import attrs
import pytest
from examples_of_plugins import ALIBI, PLUGINS, TP, example
from test_docs import failed

from nanotrain_core.errors import PluginError
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine


def slopes(case):
    engine = make_engine(case, {})
    parts = engine.run.stages.values()
    return [buffer.tolist() for part in parts for _, buffer in part.named_buffers()]


def test_each_rank_has_the_slopes_of_its_heads():
    case = example("model", "alibi", config=ALIBI, topology={"tp": 2}, overrides=TP)
    expected = [0.25, 0.0625, 0.015625, 0.00390625]
    assert run_ranks(slopes, 2, case) == [[expected[:2]] * 2, [expected[2:]] * 2]


def test_alibi_with_tensor_parallelism_trains_as_one_process_does():
    model = {"model": {"use": "alibi", **ALIBI}}
    case = example("model", "alibi", config=ALIBI)
    wrapped = attrs.evolve(case, kind="parallel", use="tp", config={}, topology={"tp": 2}, world_size=2)
    wrapped = attrs.evolve(wrapped, overrides={**model, "parallel": [{"use": "summed"}]})
    assert failed(wrapped, "gradients_equal[fp64]") == {}


@pytest.mark.full
def test_alibi_passes_every_check():
    assert failed(example("model", "alibi", config=ALIBI)) == {}


def whole_per_head(case):
    """Return what a wrapper is told that leaves what each head has an entry of as it is."""
    import nanotrain_core.testing.components.tensor_parallel_layers as sliced

    rows = sliced.slice_parameter
    sliced.slice_parameter = lambda module, key, *rest: rows(module, key, *rest) if key != "slopes" else None
    try:
        make_engine(case, {})
    except PluginError as error:
        return str(error)
    finally:
        sliced.slice_parameter = rows


def test_a_wrapper_that_leaves_an_entry_for_each_head_whole_is_refused():
    around = {"parallel": [{"use": "sliced"}, {"use": "summed"}]}
    case = example("model", "alibi", config=ALIBI, topology={"tp": 2}, overrides=around)
    for told in run_ranks(whole_per_head, 2, case):
        assert told.startswith("layers.0.alibi.slopes has an entry for each head, and is whole along tp")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("def constant(self, name)", "def other(self, name)", "give the part a method constant(name)"),
        (
            "for head in range(config.heads)]",
            "for head in range(3)]",
            "returned shape (3,); expected a tensor (4,)",
        ),
        ("return torch.tensor([2", "return list([2", "returned list; expected a tensor (4,)"),
    ],
)
def test_a_buffer_of_which_the_part_has_no_numbers_is_refused(tmp_path, old, new, told):
    source = (PLUGINS / "alibi.py").read_text()
    assert old in source
    path = tmp_path / "without_numbers.py"  # its name is the module's: alibi.py is loaded already
    path.write_text(source.replace(old, new))
    case = Case("model", use="alibi", config=ALIBI, plugins=[path])
    with pytest.raises(PluginError) as caught:
        make_engine(case, {})
    assert "layers.0.alibi.slopes" in str(caught.value)
    assert told in str(caught.value)
