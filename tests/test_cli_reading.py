import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import tomli
from fake_distribution import PLUGIN
from recipe_files import SMALL, write

from nanotrain_core import __version__
from nanotrain_core.cli import dispatch, main
from nanotrain_core.errors import Exit, LaunchError
from nanotrain_core.hookspecs import HOOKSPEC_VERSION
from nanotrain_core.launch import launcher


def call(capsys, *words) -> tuple[int, str, str]:
    """Run a command and return (exit code, stdout, stderr)."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_version_and_help(capsys):
    assert call(capsys, "--version") == (0, f"nanotrain {__version__}\n", "")
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert all(name in out for name in ("run", "check", "recipes", "plugins", "schema"))


def test_no_command_prints_the_help_and_fails(capsys):
    code, out, err = call(capsys)
    assert (code, out) == (Exit.USER, "")
    assert "usage: nanotrain" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["chek", "laptop"], "no command named 'chek' (did you mean 'check'?); commands: run, check, "),
        (["check", "laptop", "--npoc", "2"], "check: unknown option '--npoc' (did you mean '--nproc'?); "),
        (["check", "laptop", "--steps=4"], "a recipe's keys are changed by --set KEY=VALUE; "),
        (["check", "laptop", "more"], "check: one argument too many: 'more'; `nanotrain check --help`"),
        (["--vresion"], "unknown option '--vresion'; `nanotrain --help` lists what it takes"),
    ],
)
def test_a_word_no_command_takes_is_told_in_one_line(capsys, words, text):
    code, out, err = call(capsys, *words)
    assert (code, out, err.count("\n")) == (Exit.USER, "", 1)
    assert err.startswith("nanotrain: ")
    assert text in err


def test_check_shows_layout_and_components(capsys, tmp_path):
    path = write(tmp_path, SMALL + '[[parallel]]\nuse = "ddp"\n')
    code, out, err = call(capsys, "check", path, "--nproc", 2, "--nnodes", 2, "--set", "optimizer.use=sgd")
    assert (code, err) == (0, "")
    assert "pp 1 x dp 4 x cp 1 x tp 1 = 4 ranks" in out
    assert out.splitlines()[0].endswith("recipe.toml: ok")
    assert "  optimizer   sgd" in out.splitlines()


def test_check_tells_every_problem_on_stderr_without_a_traceback(capsys, tmp_path):
    path = write(tmp_path, SMALL.replace("steps", "step"))
    code, out, err = call(capsys, "check", path)
    assert (code, out) == (Exit.USER, "")
    lines = err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"nanotrain: {path}:") for line in lines)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nproc", 3], "--nproc"),
        (["--nnodes", 3], "--nnodes"),
        (["--nproc", 1, "--nnodes", 3], "--nproc x --nnodes"),
    ],
)
def test_a_wrong_world_size_is_told_with_the_options_that_were_typed(capsys, tmp_path, words, told):
    code, _, err = call(capsys, "check", write(tmp_path), *words, "--set", "topology.tp=2")
    assert code == Exit.USER
    assert err.startswith(f"nanotrain: {told}: run.ranks: 3 ranks do not fit [topology]")


def test_check_explains_origins_in_toml(capsys, tmp_path):
    path = write(tmp_path)
    code, out, _ = call(capsys, "check", path, "--explain", "--set", "run.seed=9")
    assert code == 0
    assert tomli.loads(out)["run"]["seed"] == 9
    assert "seed = 9" in out
    assert "# --set #1" in out
    assert f"# {path}:2" in out


@pytest.mark.parametrize("option", [["--nproc", "0"], ["--nnodes", "two"]])
def test_rank_counts_must_be_positive(capsys, tmp_path, option):
    code, _, err = call(capsys, "check", write(tmp_path), *option)
    assert code == Exit.USER
    assert "expected a whole number above 0" in err


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (["--max-restarts", "-1"], "--max-restarts: expected 0 or a whole number above it, got '-1'"),
        (["--rdzv-endpoint", "node1"], "--rdzv-endpoint node1: expected HOST:PORT"),
        (
            ["--rdzv-endpoint", "node1:http"],
            "--rdzv-endpoint node1:http: expected HOST:PORT",
        ),
        (["--rdzv-endpoint", ":29400"], "--rdzv-endpoint :29400: expected HOST:PORT"),
    ],
)
def test_what_would_only_be_found_out_later_is_refused_at_once(capsys, tmp_path, monkeypatch, option, text):
    """-1 restarts were taken for none, and a place to meet without its port was waited for."""
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, "run", write(tmp_path), *option)
    assert code == Exit.USER
    assert text in err
    assert not (tmp_path / "runs").exists()


def test_plugins_as_table_and_as_json(capsys):
    code, out, _ = call(capsys, "plugins")
    assert code == 0
    assert HOOKSPEC_VERSION in out
    assert "adamw" in out
    code, out, _ = call(capsys, "plugins", "--json")
    found = json.loads(out)
    assert found["hookspec_version"] == HOOKSPEC_VERSION
    builtin = next(plugin for plugin in found["plugins"] if plugin["name"] == "builtin")
    assert {"kind": "topology", "name": "grid"}.items() <= builtin["components"][0].items()


def test_broken_and_misspelt_plugins_are_loud(capsys, tmp_path):
    bad = tmp_path / "bad_cli.py"
    bad.write_text(PLUGIN.format(name="bad").replace("register_monitor", "regster_monitor"))
    code, out, err = call(capsys, "plugins", "--plugin", bad)
    assert code == Exit.USER
    assert "broken" in out
    assert "nanotrain_regster_monitor" in err
    assert "did you mean 'nanotrain_register_monitor'?" in err


def test_local_plugin_can_be_used_and_blocked(capsys, tmp_path):
    good = tmp_path / "good_cli.py"
    good.write_text(PLUGIN.format(name="good"))
    path = write(tmp_path, SMALL + '[[monitor]]\nuse = "good"\n')
    assert call(capsys, "check", path, "--plugin", good)[0] == 0
    code, _, err = call(capsys, "check", path, "--plugin", good, "--no-plugin", "good_cli")
    assert code == Exit.USER
    assert "no monitor named 'good'" in err


def test_schema_is_draft_07_and_accepts_a_recipe(capsys):
    code, out, _ = call(capsys, "schema")
    schema = json.loads(out)
    assert code == 0
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.validate(tomli.loads(SMALL), schema)


def test_recipes_are_listed_and_copied_but_never_over_a_file(capsys, tmp_path):
    code, out, _ = call(capsys, "recipes")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines()]
    assert {"laptop", "capstone"} <= {*names}
    parts = [line.split()[0] for line in out.splitlines() if "  [model] to extend: " in line]
    assert [*parts] == names[-len(parts) :] == [name for name in names if name.startswith("fragments/")]
    assert call(capsys, "check", parts[0])[0] == Exit.USER  # such a file is no run
    assert all(line.endswith(".") for line in out.splitlines())  # a whole sentence
    code, out, err = call(capsys, "recipes", "cp", "laptop", tmp_path)
    assert (code, out.strip()) == (0, str(tmp_path / "laptop.toml"))
    assert err == f"nanotrain: run it with: nanotrain run {tmp_path}/laptop.toml\n"  # not the one shipped
    assert call(capsys, "check", tmp_path / "laptop.toml")[0] == 0
    code, _, err = call(capsys, "recipes", "cp", "laptop", tmp_path)
    assert (code, err) == (Exit.USER, f"nanotrain: {tmp_path}/laptop.toml: File exists\n")
    assert os.listdir(tmp_path) == ["laptop.toml"]


def test_a_recipe_copied_to_a_read_only_file_system_is_refused(capsys, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    code, _, err = call(capsys, "recipes", "cp", "laptop", tmp_path)
    assert (code, err) == (Exit.USER, f"nanotrain: {tmp_path}/laptop.toml: Read-only file system\n")


@pytest.mark.parametrize(
    "call",
    [
        "cli.main(['schema'])",
        # rich exits with 1
        "setattr(dispatch, '_call', lambda words: rich.print('a table')) or cli.main([])",
    ],
)
def test_reader_that_stops_early_is_no_error(call):
    imports = "import rich, sys; from nanotrain_core import cli; from nanotrain_core.cli import dispatch"
    code = f"{imports}; sys.exit({call})"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == Exit.DONE


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("words", [["schema"], ["recipes"]])  # more than a buffer, and less
def test_output_to_a_full_disk_is_told_in_a_line(words):
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "nanotrain_core.cli", *words],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ended.stderr == "nanotrain: the output cannot be written: No space left on device\n"
    assert ended.returncode == Exit.USER


class Imports:
    """Stands for a module in whose import somebody presses Ctrl-C."""

    def __getattr__(self, name):
        if name == "call":
            raise KeyboardInterrupt
        raise AttributeError(name)


def test_ctrl_c_is_a_line_and_its_code_also_while_modules_are_imported(monkeypatch, capsys):
    """It was a traceback until the first import had ended, and then no word."""

    def interrupted(words):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "nanotrain_core.cli.dispatch", Imports())
        assert call(capsys, "schema") == (Exit.INTERRUPTED, "", "nanotrain: interrupted\n")
    monkeypatch.setattr(dispatch, "_call", interrupted)
    assert call(capsys, "schema") == (Exit.INTERRUPTED, "", "nanotrain: interrupted\n")


@pytest.mark.parametrize("most", [20, 4096])
def test_a_low_limit_of_open_files_is_told_in_a_line(monkeypatch, capsys, most):
    """With a higher limit the traceback tells who has left them open."""

    def opens(words):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(dispatch, "_call", opens)
    monkeypatch.setattr(dispatch, "getrlimit", lambda which: (most, most))
    if most > 512:
        with pytest.raises(OSError, match="Too many open files"):
            main(["schema"])
        return
    code, _, err = call(capsys, "schema")
    assert code == Exit.USER
    assert err == "nanotrain: `ulimit -n` allows 20 and 512 or more are expected: Too many open files\n"


def test_ranks_do_not_start_where_too_few_files_may_be_open(monkeypatch):
    monkeypatch.setattr(launcher, "getrlimit", lambda which: (20, 20))
    with pytest.raises(LaunchError, match="`ulimit -n` allows 20 open files: expected 64 or more"):
        launcher.start_forkserver(2)
