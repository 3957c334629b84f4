"""Commands that plugins add to ``nanotrain``."""

import pytest
from test_docs import write_example

from nanotrain_core.cli import main
from nanotrain_core.command import CORE_COMMANDS
from nanotrain_core.registry.advice import ALIASES, FIRST_PARTY, nearest_command

FACE = """
from nanotrain_core.api import Command, hookimpl

@hookimpl
def nanotrain_register_command(register):
    register(Command(name="{name}", summary="say hello", module={module}))
"""
HELLO = """
from nanotrain_core.api import NanotrainError, add_plugin_options

def add_arguments(parser):
    add_plugin_options(parser)
    parser.add_argument("who")

def run(args):
    if args.who == "nobody":
        raise NanotrainError("expected somebody")
    print("hello", args.who)
    return 0
"""


def plugin(folder, name="hello", module="__name__", body=HELLO, file="greeting.py"):
    folder.mkdir(exist_ok=True)
    (folder / file).write_text(FACE.format(name=name, module=module) + body)
    return str(folder / file)


def call(capsys, *words):
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_of_the_documentation(tmp_path, capsys):
    path = write_example(tmp_path, "keys.py")
    code, out, _ = call(capsys, "keys", "laptop", "batch", "--set", "batch.length=32", "--plugin", path)
    assert code == 0
    assert "length = 32" in out.splitlines()
    code, out, err = call(capsys, "keys", "laptop", "bach", "--plugin", path)
    assert (code, out, err) == (2, "", "nanotrain: no table [bach] (did you mean 'batch'?)\n")


def test_a_command_is_called_as_the_cores_are(tmp_path, capsys):
    path = plugin(tmp_path)
    assert call(capsys, "hello", "you", "--plugin", path) == (0, "hello you\n", "")
    code, out, err = call(capsys, "hello", "nobody", "--plugin", path)
    assert (code, out, err) == (2, "", "nanotrain: expected somebody\n")
    code, _, err = call(capsys, "hello", "you", "--plugn", path)
    assert code == 2
    assert "no command named 'hello'" in err  # the plugin was not loaded
    code, _, err = call(capsys, "hello", "you", "--loud", "--plugin", path)
    assert code == 2
    assert "hello: unknown option '--loud'" in err
    assert f"`nanotrain hello --plugin {path} --help` lists what it takes" in err


PLAIN = """
def add_arguments(parser):
    parser.add_argument("who")

def run(args):
    print("hello", args.who, "of", len(args.plugin))
    return 0
"""


def test_a_command_of_a_file_takes_plugin_options_that_it_does_not_ask_for(tmp_path, capsys):
    path = plugin(tmp_path, body=PLAIN)
    assert call(capsys, "hello", "--plugin", path, "you") == (0, "hello you of 1\n", "")
    with pytest.raises(SystemExit) as end:
        main(["hello", "--plugin", path, "--help"])
    assert end.value.code == 0
    assert "--no-plugin NAME" in capsys.readouterr().out
    code, _, err = call(capsys, "hello", "--help")
    assert code == 2
    assert err.endswith("; of a file or folder: nanotrain hello --plugin PATH\n")


def test_a_plugin_that_cannot_be_loaded_says_why_where_its_command_is_called(tmp_path, capsys):
    path = plugin(tmp_path, body="\nundefined_name\n")
    code, _, err = call(capsys, "hello", "you", "--plugin", path)
    first, second = err.splitlines()
    assert (code, first[:39]) == (2, "nanotrain: no command named 'hello'; co")
    assert "is broken: " in second
    assert "name 'undefined_name' is not defined" in second
    code, out, err = call(capsys, "metrics", "loss", "--plugin", path)
    assert code == 2
    assert "loss" in out
    assert err == f"{second}\n"


def test_plugins_lists_commands(tmp_path, capsys):
    code, out, _ = call(capsys, "plugins", "--plugin", plugin(tmp_path))
    assert code == 0
    assert any(line.split() == ["greeting", *line.split()[1:-4], "command", "hello", "say", "hello"]
               for line in out.splitlines())  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "run"}, "command 'run' is one of the core's own; choose another name"),
        ({"name": "Hello"}, "command 'Hello': a name has only lower-case letters, digits and hyphens"),
    ],
)
def test_a_name_that_cannot_be(tmp_path, capsys, change, text):
    code, _, err = call(capsys, "plugins", "--plugin", plugin(tmp_path, **change))
    assert code == 2
    assert text in err


def test_two_plugins_with_one_command_are_both_named(tmp_path, capsys):
    first, second = plugin(tmp_path / "a"), plugin(tmp_path / "b", file="welcome.py")
    code, _, err = call(capsys, "hello", "you", "--plugin", first, "--plugin", second)
    assert code == 2
    assert "command 'hello' is registered by plugin 'greeting'" in err
    assert "--no-plugin greeting or --no-plugin welcome, or rename the command" in err
    asked = ("hello", "you", "--plugin", first, "--plugin", second, "--no-plugin", "welcome")
    assert call(capsys, *asked)[0] == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"module": "'no_such_module_at_all'"}, "command 'hello': no_such_module_at_all: "),
        ({"body": "\ndef run(args):\n    return 0\n"}, "has no function add_arguments"),
    ],
)
def test_a_module_that_is_not_what_it_should_be(tmp_path, capsys, change, text):
    code, _, err = call(capsys, "hello", "you", "--plugin", plugin(tmp_path, **change))
    assert code == 2
    assert text in err


def test_a_command_of_this_project_that_is_not_installed_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(FIRST_PARTY, ("command", "foresee"), "nanotrain-fore-see")
    code, _, err = call(capsys, "foresee", "laptop")
    assert code == 2
    assert err == (
        "nanotrain: no command named 'foresee' is installed; to get it: pip install nanotrain-fore-see "
        "(in a checkout: pip install -e plugins/fore_see)\n"
    )


@pytest.mark.parametrize(("word", "meant"), ALIASES.items())
def test_a_word_of_another_program_is_told_what_it_is_here(capsys, word, meant):
    code, out, err = call(capsys, word, "laptop")
    assert (code, out) == (2, "")
    assert err.startswith(f"nanotrain: no command named '{word}' (did you mean 'nanotrain {meant}'?); ")


def test_every_alias_is_of_a_command_and_none_is_a_command_itself(capsys):
    commands = {*CORE_COMMANDS, *(name for kind, name in FIRST_PARTY if kind == "command")}
    assert not commands & ALIASES.keys()
    assert {meant.split()[0] for meant in ALIASES.values()} <= {*commands, "--help", "--version"}


@pytest.mark.parametrize(
    ("word", "near"),
    [("rnu", "run"), ("pln", "plan"), ("chek", "check"), ("cpkt", "ckpt"), ("conv", "convert")]
    + [(word, None) for word in ("serve", "start", "bench", "remove", "preview", "deploy")],
)
def test_only_a_command_that_is_nearly_the_same_is_suggested(word, near):
    commands = [*CORE_COMMANDS, *(name for kind, name in FIRST_PARTY if kind == "command")]
    assert nearest_command(word, commands) == (f" (did you mean '{near}'?)" if near else "")


EXTENSION = """
def add_arguments(parser):
    parser.add_argument("--loud", action="store_true")

def takes(args):
    return args.who.endswith("!")

def run(args):
    print("HELLO" if args.loud else "hi", args.who)
    return 0
"""


def extension(folder, **options):
    path = plugin(folder, file="more.py", body=EXTENSION, **options)
    text = (folder / "more.py").read_text()
    (folder / "more.py").write_text(text.replace("module=__name__", "module=__name__, extends=True"))
    return path


def test_a_plugin_adds_to_the_command_of_another(tmp_path, capsys):
    base = ["--plugin", plugin(tmp_path, body=PLAIN)]
    more = ["--plugin", extension(tmp_path)]
    assert call(capsys, "hello", "you", *base, *more) == (0, "hello you of 2\n", "")
    assert call(capsys, "hello", "you!", *base, *more) == (0, "hi you!\n", "")
    assert call(capsys, "hello", "you!", "--loud", *base, *more) == (0, "HELLO you!\n", "")
    assert call(capsys, "hello", "you!", *base)[1] == "hello you! of 1\n"


def test_what_adds_to_a_command_is_none_by_itself(tmp_path, capsys):
    code, _, err = call(capsys, "hello", "you!", "--plugin", extension(tmp_path))
    assert code == 2
    assert "no command named 'hello'" in err


def test_what_adds_to_a_command_says_what_it_takes(tmp_path, capsys):
    path = extension(tmp_path)
    text = (tmp_path / "more.py").read_text().replace("def takes", "def takers")
    (tmp_path / "more.py").write_text(text)
    code, _, err = call(capsys, "hello", "you!", "--plugin", plugin(tmp_path), "--plugin", path)
    assert code == 2
    assert "has no function takes" in err
