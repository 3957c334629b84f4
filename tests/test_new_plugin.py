"""`nanotrain new-plugin`: what it writes passes its own checks, is formatted, and never replaces a file."""

import ast
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command import nanotrain
from test_docs import failed

from nanotrain_core import api, testing
from nanotrain_core.api import torch as api_torch
from nanotrain_core.cli import main
from nanotrain_core.cli.plugin_templates import OFFERS, NewPlugin
from nanotrain_core.component import KINDS
from nanotrain_core.errors import Exit
from nanotrain_core.testing import Case, planned

ROOT = Path(__file__).parents[1]


def call(capsys, *words):
    code = main(["new-plugin", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def write(folder, plugin):
    for path, text in plugin.files().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def cases(plugin, folder):
    """Return the cases that the plugin's own test file has, with the plugin loaded by its path."""
    for proof in plugin.proofs:
        given = {"config": proof.config, "topology": proof.topology, "overrides": proof.overrides}
        ranks = {"world_size": proof.world_size} if proof.world_size else {}
        kind = OFFERS[plugin.kind].kind
        yield Case(kind, use=plugin.name, plugins=[folder / plugin.root], **given, **ranks)


def test_every_kind_has_a_template():
    assert set(OFFERS) == {*KINDS, "gradient_sync", "command"}


def test_what_is_written_is_formatted_and_imports_from_the_api_alone(tmp_path):
    for kind in OFFERS:
        for package in (False, True):
            write(tmp_path, NewPlugin(f"new_{kind}", kind, package))
    ruff = [sys.executable, "-m", "ruff"]
    options = ["--isolated", "--line-length", "110"]
    chosen = ["--select", "E,F,W,I,UP,B,RUF"]
    for words in (["format", "--check", *options], ["check", *options, *chosen]):
        done = subprocess.run([*ruff, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    modules = {each.__name__: each for each in (api, api_torch, testing)}
    for path in tmp_path.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("nanotrain_core"):
                offered = dir(modules[node.module])
                assert [each.name for each in node.names if each.name not in offered] == [], path


def test_one_file_is_written_and_it_is_printed_how_to_use_and_to_test_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, "steady", "--kind", "optimizer")
    assert (code, err) == (Exit.DONE, "")
    assert [line.strip() for line in out.splitlines()] == [
        "wrote steady.py",
        """nanotrain run laptop --set 'optimizer={use="steady",lr=1e-3}' --plugin steady.py""",
        "nanotrain conformance optimizer:steady --plugin steady.py",
        "nanotrain conformance optimizer:steady --degree dp=2 "
        """--with 'parallel=[{use="summed"}]' --plugin steady.py""",
    ]
    assert (tmp_path / "steady.py").read_text() == NewPlugin("steady", "optimizer", False).files()[
        "steady.py"
    ]


@pytest.mark.full  # .ci/wheels does it for every kind
def test_a_package_has_what_it_needs_and_passes_every_check(tmp_path, capsys):
    code, out, _ = call(capsys, "my_thing", "--kind", "data", "--package", "--folder", tmp_path)
    assert code == Exit.DONE
    assert out.splitlines()[:2] == [f"wrote {tmp_path}/nanotrain-my-thing", f"cd {tmp_path}"]
    assert "pip install -e nanotrain-my-thing && pytest nanotrain-my-thing" in out
    root = tmp_path / "nanotrain-my-thing"
    assert {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} == {
        "README.md",
        "pyproject.toml",
        "nanotrain_my_thing/__init__.py",
        "nanotrain_my_thing/data.py",
        "tests/test_my_thing.py",
    }
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["nanotrain.plugins"] == {"my_thing": "nanotrain_my_thing"}
    assert project["dependencies"] == ["nanotrain-core>=0.1,<0.2"]
    assert main(["conformance", "data:my_thing", "--plugin", str(root)]) == Exit.DONE


def test_a_readme_installs_the_package_and_then_uses_it_without_plugin():
    """An installed plugin that ``--plugin`` names too is refused."""
    files = NewPlugin("my_thing", "optimizer", True).files()
    readme = files["nanotrain-my-thing/README.md"]
    assert "\nnanotrain run laptop --set 'optimizer={use=\"my_thing\",lr=1e-3}'\n" in readme
    assert "--plugin" not in readme


def test_the_command_that_is_written_runs(tmp_path, capsys):
    write(tmp_path, NewPlugin("count_tokens", "command", False))
    words = ["laptop", "--steps", "3", "--plugin", str(tmp_path / "count_tokens.py")]
    assert main(["count-tokens", *words]) == Exit.DONE
    assert capsys.readouterr().out == "2048 tokens a step, 6144 in 3 steps\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["x", "--kind", "optimiser"], "no kind 'optimiser' (did you mean 'optimizer'?); kinds: topology,"),
        (["My-Plugin", "--kind", "data"], "'My-Plugin' cannot be the name of a module; expected lower-case"),
        (["My-Plugin", "--kind", "data"], ", for example my_plugin"),
        (["2fast", "--kind", "data"], ", for example my_2fast"),
        (["class", "--kind", "data"], ", for example class_"),
        (["adamw", "--kind", "optimizer"], "the name is taken: optimizer 'adamw' is plugin 'builtin'"),
        (
            ["run", "--kind", "command"],
            "the name is taken: there is a command 'run'; expected another, such as my_run",
        ),
        (["builtin", "--kind", "data"], "the name is taken: plugin 'builtin'"),
        (["core", "--kind", "data", "--package"], "the name is taken: there is a module nanotrain_core"),
        (["there", "--kind", "data"], "there.py is there already: choose another NAME or --folder"),
        (["x", "--kind", "data", "--folder", "nowhere"], "--folder nowhere: expected a folder that is there"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(tmp_path, capsys, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").write_text("mine")
    code, out, err = call(capsys, *words)
    assert (code, out, len(err.splitlines())) == (Exit.USER, "", 1)
    assert told in err
    assert [path.name for path in tmp_path.iterdir()] == ["there.py"]
    assert (tmp_path / "there.py").read_text() == "mine"


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind for kind in OFFERS if kind != "command"])
def test_one_file_of_every_kind_passes_every_check(tmp_path, kind):
    plugin = NewPlugin("new_one", kind, False)
    write(tmp_path, plugin)
    assert [failed(case) for case in cases(plugin, tmp_path)] == [{}] * len(plugin.proofs)


@pytest.mark.parametrize("kind", [kind for kind in OFFERS if kind != "command"])
def test_the_first_command_that_tests_it_leaves_nothing_around_it_to_the_author(kind):
    offered = OFFERS[kind].kind
    told = NewPlugin("new_one", kind, True).tests()[0]
    assert told == f"nanotrain conformance {offered}:new_one --plugin nanotrain-new-one"


def test_a_new_parallel_wrapper_is_not_tried_with_what_it_refuses(tmp_path):
    plugin = NewPlugin("new_one", "parallel", False)
    write(tmp_path, plugin)
    listed, skipped = planned(Case("parallel", use="new_one", plugins=[tmp_path / plugin.root]))
    assert not [trial.id for trial in listed if "experts" in trial.id]
    (left_out,) = (each for each in skipped if "experts" in each.name)
    assert "new_one splits no experts" in left_out.reason


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind for kind in OFFERS if kind != "command"])
def test_one_file_of_every_kind_passes_in_every_variant(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    plugin = NewPlugin("new_one", kind, False)
    write(tmp_path, plugin)
    assert main(shlex.split(plugin.tests()[0])[1:]) == Exit.DONE


@pytest.mark.full
@pytest.mark.parametrize("kind", OFFERS)
def test_the_run_that_is_printed_trains(tmp_path, kind):
    plugin = NewPlugin("new_one", kind, False)
    write(tmp_path, plugin)
    words = shlex.split(plugin.run())[1:]
    small = ["run.steps=2", "batch.length=16", "evaluation.every=0", "run.log_every=1"]
    small += [] if kind == "model" else ["model.layers=2", "model.width=48"]
    if kind != "command":
        words += [word for line in small for word in ("--set", line)] + ["--nproc", "2"] * (
            "--nproc" not in words
        )
    done = nanotrain(*words, cwd=tmp_path)
    assert done.code == Exit.DONE, done.err


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """Build the core's wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder]
    subprocess.run([*pip, ROOT], check=True)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("kind", OFFERS)
def test_a_package_of_every_kind_passes_its_own_tests_in_a_new_environment(tmp_path, wheels, kind):
    """It has two wheels installed, and links to all that is not ours here: to torch and pytest."""
    plugin = NewPlugin("new_one", kind, True)
    write(tmp_path, plugin)
    home = tmp_path / "home"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip"]
    root = tmp_path / plugin.root
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path / "wheel", root]
    subprocess.run(build, check=True)
    built = [*(tmp_path / "wheel").glob("*.whl"), *wheels.glob("nanotrain_core-*.whl")]
    assert len(built) == 2
    subprocess.run([*pip, "--python", home / "bin/python", "install", "-q", "--no-deps", *built], check=True)
    for folder in (path for path in sys.path if path.endswith("site-packages")):
        for entry in Path(folder).iterdir():
            ours = "nanotrain" in entry.name or entry.suffix == ".pth"
            if not ours and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    run = [home / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    (tmp_path / "tests").mkdir()
    for test in (root / "tests").iterdir():
        test.rename(tmp_path / "tests" / test.name)
    done = subprocess.run(
        [*run, "tests"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    listed = subprocess.run(
        [home / "bin/nanotrain", "plugins"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split()[0] for line in listed.stdout.splitlines() if "0.1.0" in line] == [
        "builtin",
        "new_one",
    ]
