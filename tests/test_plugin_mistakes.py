"""Each mistake in a plugin is told in one text that names the component, and where to look."""

import re

import pytest
from mistaken_plugins import build, plugin, registry
from recipe_files import SMALL, write

from nanotrain_core.cli import main
from nanotrain_core.errors import DataError, Exit, PluginError
from nanotrain_core.recipe.component_functions import gpu_refusals
from nanotrain_core.recipe.load import resolve_recipe
from nanotrain_core.registry.discovery import PluginArguments


def check_command(capsys, path, text=SMALL + '[[monitor]]\nuse = "mine"\n'):
    code = main(["check", str(write(path.parent, text)), "--plugin", str(path)])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ('f"{__name__}:biuld"', r"monitor 'mine': factory .* has no 'biuld' \(did you mean 'build'\?\)"),
        ('"no_such_place.x:build"', r"monitor 'mine': factory .*ModuleNotFoundError: No module named"),
        ('f"{__name__}:__name__"', r"monitor 'mine': factory .* cannot be called: it is a str"),
    ],
)
def test_a_factory_that_is_not_there(tmp_path, factory, text):
    with pytest.raises(PluginError, match=text):
        build(plugin(tmp_path, factory=factory))


def test_a_factory_that_raises_is_named_and_its_traceback_kept(tmp_path):
    with pytest.raises(
        PluginError, match=r"monitor 'mine': its factory raised KeyError.*mistake.py:\d+\)"
    ) as e:
        build(plugin(tmp_path, build="return {}['license']"))
    assert isinstance(e.value.__cause__, KeyError)


def test_a_mistake_told_on_purpose_is_passed_on_unchanged(tmp_path):
    with pytest.raises(DataError, match=r"^buy more data$"):
        build(plugin(tmp_path, build='raise DataError("buy more data")'))


def test_a_factory_that_returns_its_class(tmp_path):
    made = "from nanotrain_core.api.torch import Monitor; return Monitor"
    with pytest.raises(PluginError, match=r"returned the class Monitor; expected .*return Monitor\(config\)"):
        build(plugin(tmp_path, build=made))


def test_a_factory_that_returns_nothing(tmp_path):
    with pytest.raises(PluginError, match="its factory returned None"):
        build(plugin(tmp_path, build="pass"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"check": "    return 1 / 0\n"}, "its check raised ZeroDivisionError: division by zero ("),
        ({"check": "    yield 1 / 0\n"}, "its check raised ZeroDivisionError: division by zero ("),
        ({"check": "    yield 'no'\n"}, "its check gave 'no' where it must yield Problem(key, message) ("),
        ({"check": "    pass\n"}, "its check gave None where it must yield Problem(key, message) ("),
        ({"signature": "(recipe)"}, "its check must take (recipe, config, layout): too many positional"),
    ],
)
def test_a_check_that_misbehaves_is_the_plugins_mistake(tmp_path, capsys, change, text):
    code, err = check_command(capsys, plugin(tmp_path, **change))
    assert code == Exit.USER
    assert err.startswith("nanotrain: monitor 'mine' of plugin 'mistake' (mistake.py sha256-")
    assert text in err
    assert "mistake.py:1" in err


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("lambda *_: 1 / 0", "its refuses_gpu raised ZeroDivisionError: division by zero ("),
        ("lambda *_: [9]", "its refuses_gpu gave 9 where it must yield str ("),
        ("check", "its refuses_gpu must take (recipe, config, layout, capability): too many positional"),
    ],
)
def test_a_rule_for_gpus_that_misbehaves_is_the_plugins_mistake(tmp_path, rule, text):
    made = plugin(tmp_path, register=f'Component(name="mine", refuses_gpu={rule}, config=Config, ')
    recipe = write(tmp_path, SMALL + '[[monitor]]\nuse = "mine"\n')
    found = resolve_recipe(recipe, plugins=PluginArguments(local=[str(made)]))
    with pytest.raises(PluginError, match=re.escape(text)):
        gpu_refusals(found.recipe, found.registry, found.layout, (9, 0))


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        ("KeyError(value)", "its validator raised KeyError: 0 ("),
        ("ValueError", "its validator raised ValueError"),
    ],
)
def test_a_validator_that_fails_is_told_with_its_key(tmp_path, capsys, raised, text):
    config = f"""
import attrs
def refuse(config, field, value):
    raise {raised}
"""
    keys = '''    """One key."""
    size: int = attrs.field(default=0, validator=refuse)'''
    path = plugin(tmp_path, head=config)
    path.write_text(path.read_text().replace('    """No keys."""', keys))
    code, err = check_command(capsys, path)
    assert code == Exit.USER
    assert "monitor.0.size: " + text in err


def test_a_factory_in_no_module_is_found_before_anything_starts(tmp_path, capsys):
    code, err = check_command(capsys, plugin(tmp_path, factory='"no_such_place.x:build"'))
    assert code == Exit.USER
    assert "monitor.0.use: monitor 'mine': its factory 'no_such_place.x:build' is in no module" in err


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("lambda recipe, config: ()", "its check_model must take (recipe, config, layout, model)"),
        ("lambda *_: ['no']", "its check_model gave 'no' where it must yield Problem(key, message)"),
        ("lambda *_: 1 / 0", "its check_model raised ZeroDivisionError"),
        ("3", "must take (recipe, config, layout, model): 3 is not a callable object"),
    ],
)
def test_a_check_of_the_model_that_is_wrong_is_the_plugins_mistake(tmp_path, capsys, function, text):
    register = 'Component(name="mine", config=Config, check_model=f"{__name__}:ask", '
    path = plugin(tmp_path, head=f"\nimport attrs\nask = {function}\n", register=register)
    code, err = check_command(capsys, path)
    assert code == Exit.USER
    assert text in err


def test_a_check_of_the_model_that_is_not_there_is_told_with_its_component(tmp_path, capsys):
    register = 'Component(name="mine", config=Config, check_model=f"{__name__}:chek", '
    code, err = check_command(capsys, plugin(tmp_path, register=register))
    assert code == Exit.USER
    assert "nanotrain: monitor 'mine' of plugin 'mistake' (mistake.py sha256-" in err
    assert "has no 'chek' (did you mean 'check'?)" in err


def test_a_mistake_inside_a_called_library_is_told_with_the_plugins_line(tmp_path, capsys):
    head = """
import attrs
def ask(recipe, config, layout, model):
    import torch
    yield torch.nn.Linear(1, 1).wieght
"""
    register = 'Component(name="mine", config=Config, check_model=f"{__name__}:ask", '
    path = plugin(tmp_path, head=head, register=register)
    code, err = check_command(capsys, path)
    assert code == Exit.USER
    line = path.read_text().splitlines().index("    yield torch.nn.Linear(1, 1).wieght") + 1
    assert (
        f"its check_model raised AttributeError: 'Linear' object has no attribute 'wieght' ({path}:{line})"
        in err
    )


@pytest.mark.parametrize("given", ["'layers.0'", "('modules.0', 3)", "('modules.0', 'a', 'b')"])
def test_patterns_that_are_no_pairs_are_the_plugins_mistake(tmp_path, capsys, given):
    register = f'Component(name="mine", config=Config, reads_modules=lambda config: [{given}], '
    code, err = check_command(capsys, plugin(tmp_path, register=register))
    assert code == Exit.USER
    assert (
        f"monitor 'mine': reads_modules gave {given} where it must yield (key, pattern), two strings" in err
    )


def test_a_topology_without_a_layout_is_the_plugins_mistake(tmp_path, capsys):
    code, err = check_command(capsys, plugin(tmp_path, kind="topology"), SMALL + '[topology]\nuse = "mine"\n')
    assert code == Exit.USER
    assert err.startswith("nanotrain: topology 'mine' of plugin 'mistake' (")
    assert "layout" in err


def test_a_wrapper_is_applied_once(tmp_path, capsys):
    twice = SMALL + '[[parallel]]\nuse = "mine"\n' * 2
    code, err = check_command(capsys, plugin(tmp_path, kind="parallel"), twice)
    assert code == Exit.USER
    assert "parallel.1: parallel 'mine' is already parallel.0; remove one of them" in err


def test_monitors_may_repeat(tmp_path, capsys):
    text = SMALL + '[[monitor]]\nuse = "jsonl"\n' + '[[monitor]]\nuse = "mine"\n' * 2
    assert check_command(capsys, plugin(tmp_path), text) == (Exit.DONE, "")


def test_a_clash_names_only_the_plugin_that_may_go(tmp_path):
    path = plugin(tmp_path, register='Component(name="jsonl", config=Config, ')
    with pytest.raises(PluginError, match=r"; --no-plugin mistake, or rename the component$"):
        registry(path).get("monitor", "jsonl")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"register": '"mine", dict(config=Config, '},
            "must call register(Component(...)) with one Component",
        ),
        ({"register": 'Component(nam="mine", config=Config, '}, "'nam'"),
        ({"register": 'Component(name="mine", confg=Config, '}, "(did you mean 'config'?)"),
        ({"head": "\nimport attrs, ()\n"}, "SyntaxError: invalid syntax ("),
        ({"factory": "check"}, "is not of the form 'module:attribute'"),
        (
            {"register": 'Component(name="mine", survey=len, config=Config, '},
            "survey <built-in function len> is not of the form 'module:attribute'",
        ),
        (
            {"register": 'Component(name="mine", check_model=len, config=Config, '},
            "check_model <built-in function len> is not of the form 'module:attribute'",
        ),
        (
            {"register": 'Component(name="mine", provides="sync", config=Config, '},
            "provides, requires, conflicts and mesh_dims are sets of words, got the string 'sync': write {",
        ),
        (
            {"register": 'Component(name="mine", mesh_dims=None, config=Config, '},
            "provides, requires, conflicts and mesh_dims are sets of words, got None",
        ),
    ],
)
def test_a_mistake_in_the_face_is_told_without_noise(tmp_path, change, text):
    (broken,) = registry(plugin(tmp_path, **change)).broken
    assert text in broken.error
    assert "<frozen" not in broken.error


def test_an_unknown_hook_is_told_in_one_short_line(tmp_path):
    (broken,) = registry(plugin(tmp_path, kind="monitr")).broken
    near = "(did you mean 'nanotrain_register_monitor'?)"
    assert broken.error == f"unknown hook 'nanotrain_register_monitr' {near}"


def test_a_table_that_is_piped_has_one_line_per_component_and_the_reason(tmp_path, capsys):
    path = plugin(tmp_path, kind="monitr")
    assert main(["plugins", "--plugin", str(path)]) == Exit.USER
    lines = capsys.readouterr().out.splitlines()
    assert any("broken" in line and "unknown hook" in line for line in lines)
    assert len(lines) == 2 + sum(max(1, len(p.components) + len(p.commands)) for p in registry(path).plugins)


def test_a_face_that_imports_torch_is_named(tmp_path):
    import subprocess
    import sys

    path = plugin(tmp_path, head="\nimport attrs, torch\n")
    command = [sys.executable, "-m", "nanotrain_core.cli", "plugins", "--plugin", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "plugin 'mistake' (mistake.py sha256-" in done.stderr
    assert "imports torch: move that behind the factory" in done.stderr


def test_a_resolved_recipe_says_which_file_it_was_made_with(tmp_path, capsys):
    versions = '[versions]\n"mistake.py" = "sha256-123"\n'
    path = write(tmp_path, SMALL + '[[monitor]]\nuse = "mine"\n' + versions)
    assert main(["check", str(path)]) == Exit.USER
    assert "this recipe was made with mistake.py: give --plugin mistake.py" in capsys.readouterr().err
