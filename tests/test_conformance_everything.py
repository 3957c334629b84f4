"""``nanotrain conformance KIND:NAME``, with no options, passes for every component of this repository."""

import io
import os
import subprocess
import sys
from collections import deque
from pathlib import Path

import attrs
import pytest

from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing import Case, planned
from nanotrain_core.testing.case import CORPUS
from nanotrain_core.testing.disaster import writes
from nanotrain_core.testing.variants import filled, variants_of

COMPONENTS = [
    f"{kind}:{component.name}" for plugin in load_plugins().plugins for kind, component in plugin.components
]


@pytest.mark.full
@pytest.mark.parametrize("component", COMPONENTS)
def test_the_command_without_options_passes(component, tmp_path):
    words = [sys.executable, "-m", "nanotrain_core.cli", "conformance", component]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_data_with_paths_reads_what_does_not_repeat_itself():
    text = Path(CORPUS).read_text()
    stretches = [text[at : at + 5] for at in range(len(text) - 4)]
    assert len(set(stretches)) == len(stretches)
    assert filled(Case("data", use="text")).config["paths"] == [CORPUS]


def test_what_is_put_around_a_component_may_be_keys_of_its_own():
    case = Case("data", use="text", overrides={"data": {"paths": ["a"], "validation_fraction": 0.5}})
    settings = filled(case).settings()
    assert (settings.validation_fraction, *settings.paths) == (0.5, "a")
    given = attrs.evolve(case, config={"validation_fraction": 0.25})
    assert given.settings().validation_fraction == 0.25


def test_only_what_may_change_the_disk_counts_as_a_write(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        for function in (file.write, file.close, os.write, os.replace, os.fsync, open):
            assert writes(function), function
    for function in (io.BytesIO().write, io.StringIO().close, [].remove, deque().remove, os.close, len):
        assert not writes(function), function


def test_an_option_that_needs_another_machine_is_skipped_with_the_reason(tmp_path):
    plugin = tmp_path / "elsewhere.py"
    plugin.write_text(
        "from typing import Literal\n"
        "import attrs\n"
        "from nanotrain_core import hookimpl\n"
        "from nanotrain_core.component import Component\n"
        "from nanotrain_core.errors import NanotrainError\n"
        "@attrs.define(frozen=True, kw_only=True)\n"
        "class Config:\n"
        "    device: Literal['cpu', 'moon'] = 'cpu'\n"
        "def build(config):\n"
        "    if config.device == 'moon':\n"
        "        raise NanotrainError('schedule.device: needs a moon')\n"
        "@hookimpl\n"
        "def nanotrain_register_schedule(register):\n"
        "    register(Component(name='elsewhere', config=Config, factory=f'{__name__}:build'))\n"
    )
    _, skipped = planned(Case("schedule", use="elsewhere", plugins=[plugin]))
    last = skipped[-1]
    assert (last.name, last.reason) == ("device=moon", "refused: schedule.device: needs a moon")


@pytest.mark.parametrize("quick", [False, True])
def test_a_component_that_requires_a_capability_is_tested_beside_one_that_provides_it(tmp_path, quick):
    plugin = tmp_path / "needs_stages.py"
    plugin.write_text(
        "from nanotrain_core import hookimpl\n"
        "from nanotrain_core.builtin.configs import AccumulateConfig, ConsoleConfig\n"
        "from nanotrain_core.component import Component\n"
        "@hookimpl\n"
        "def nanotrain_register_schedule(register):\n"
        "    register(Component(name='bubbly', config=AccumulateConfig, provides={'bubbles'},\n"
        "        factory='nanotrain_core.pipeline.accumulate:Accumulate'))\n"
        "@hookimpl\n"
        "def nanotrain_register_monitor(register):\n"
        "    register(Component(name='watches', config=ConsoleConfig, requires={'bubbles'},\n"
        "        factory='nanotrain_core.monitors.console:Console'))\n"
    )
    first = next(variants_of(Case("monitor", use="watches", plugins=[plugin]), quick=quick))
    assert first.case.recipe().schedule.use == "bubbly"


def test_expert_and_context_parallelism_are_tried_with_few_tokens_and_with_tensor_parallelism():
    experts = {each.name for each in variants_of(Case("parallel", use="ep_deepseek"))}
    context = {each.name for each in variants_of(Case("parallel", use="cp"))}
    assert {"ep2-uneven", "ep2-no_tokens", "etp2-uneven", "etp2-no_tokens"} <= experts
    assert {"cp2-tp2", "cp2-tp2-sp", "cp2-uneven"} <= context


def test_no_checkpoint_has_to_equal_another_layout_in_bfloat16():
    """Gradients are summed in another order there, and weights round otherwise: any format would fail."""
    listed, _ = planned(
        Case("checkpoint", use="simple", topology={"dp": 2}, overrides={"parallel": [{"use": "summed"}]})
    )
    resumed = [trial.id for trial in listed if trial.label.startswith("goes_on_on_another_layout")]
    assert resumed
    assert not [name for name in resumed if "bf16" in name]
