"""Everything that only reads answers without importing torch, which alone takes seconds."""

import subprocess
import sys

import pytest

FREE = [
    "nanotrain_core.component",
    "nanotrain_core.hookspecs",
    "nanotrain_core.errors",
    "nanotrain_core.recipe.divisibility",
    "nanotrain_core.launch.check_inputs",
    "nanotrain_core.layout.layout",
    "nanotrain_core.registry.discovery",
    "nanotrain_core.registry.registry",
    "nanotrain_core.pipeline.simulator",
    "nanotrain_core.recipe.load",
    "nanotrain_core.recipe.schema",
    "nanotrain_core.recipe.write",
    "nanotrain_core.builtin",
    "nanotrain_core.builtin.configs",
    "nanotrain_core.builtin.transformer_config",
    "nanotrain_core.optim.moment_groups",
    "nanotrain_core.data.text_survey",
    "nanotrain_core.api.text",
    "nanotrain_core.checkpoint.simple_listing",
    "nanotrain_core.layout.grid",
    "nanotrain_core.pipeline.accumulate",
    "nanotrain_core.cli",
    "nanotrain_core.cli.check",
    "nanotrain_core.cli.ckpt",
    "nanotrain_core.cli.replay",
    "nanotrain_core.cli.metrics",
    "nanotrain_core.cli.plugins",
    "nanotrain_core.cli.recipes",
    "nanotrain_core.cli.schedule",
    "nanotrain_core.cli.schema",
    "nanotrain_core.cli.run",
    "nanotrain_core.testing.pytest_plugin",
]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_modules_that_every_command_imports_are_torch_free():
    imports = "".join(f"import {name}; assert 'torch' not in sys.modules, {name!r}\n" for name in FREE)
    done = python(f"import sys\n{imports}")
    assert done.returncode == 0, done.stderr


@pytest.mark.full_cases("plugins --json", "check laptop", "recipes")
@pytest.mark.parametrize(
    "words",
    [
        "plugins",
        "plugins --json",
        "metrics",
        "check laptop",
        "check capstone --explain",
        "schema",
        "recipes",
        "schedule zb_h1",
    ],
)
def test_reading_commands_are_torch_free(words):
    done = python(
        "import sys; from nanotrain_core.cli import main\n"
        f"assert main({words.split()!r}) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_imports_no_torch_and_no_rich():
    code = (
        "import sys; from nanotrain_core.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'rich'} & set(sys.modules)"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "check" in done.stdout
