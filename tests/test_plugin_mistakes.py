"""Each mistake in a plugin is told in one text that names the component, and where to look."""

import pytest
from recipe_files import SMALL, write

from nanotrain_core.cli import main
from nanotrain_core.errors import DataError, Exit, PluginError
from nanotrain_core.recipe.tree import Selection
from nanotrain_core.registry.discovery import PluginArguments, discover
from nanotrain_core.registry.registry import Registry

PLUGIN = '''
import attrs
from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.errors import DataError, Problem
from nanotrain_core.recipe.model_config import ModelConfig
from nanotrain_core.recipe.tree import OptimizerConfig

@attrs.define(frozen=True, kw_only=True)
class Config({base}):
    """No keys."""

def check(recipe, config, layout):
    return ()

@hookimpl
def nanotrain_register_{kind}(register):
    register(Component(name="mine", config=Config, factory=f"{{__name__}}:build", check=check))

def build(config):
    {build}
'''

BASES = {"model": "ModelConfig", "optimizer": "OptimizerConfig"}


def plugin(folder, build="return object()", kind="monitor", name="mistake.py", **changes):
    """Write a plugin; ``changes`` replaces its texts: ``old=new`` with old one of the keys below."""
    text = PLUGIN.format(build=build, kind=kind, base=BASES.get(kind, "object"))
    olds = {
        "factory": 'f"{__name__}:build"',
        "check": "    return ()\n",
        "signature": "(recipe, config, layout)",
        "register": 'Component(name="mine", config=Config, ',
        "head": "\nimport attrs\n",
    }
    for key, new in changes.items():
        assert olds[key] in text
        text = text.replace(olds[key], new)
    path = folder / name
    path.write_text(text)
    return path


def registry(*paths):
    return Registry(discover(PluginArguments(local=[str(path) for path in paths])))


def build(path, kind="monitor"):
    found = registry(path)
    assert not found.broken, found.broken
    return found.build(Selection(kind, "mine", found.get(kind, "mine").config()))


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


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "model",
            "without layers, vocab_size, max_length, loss_weights, build, loss_counts, flops",
        ),
        ("topology", r"without layout \(see nanotrain_core.api.torch.Topology\)"),
        (
            "monitor",
            r"derive from nanotrain_core.api.torch.Monitor: .* without every_step, .* and 18 more$",
        ),
        (
            "parallel",
            r"derive from nanotrain_core.api.torch.Parallel: .* without apply, around, shard, splits_linear$",
        ),
        ("precision", r"from nanotrain_core.api.torch.Precision: .* without parameter_dtype, .* more$"),
        ("kernels", r"from nanotrain_core.api.torch.Kernels: .* without prepare, ops, gemm and 2 more$"),
    ],
)
def test_an_object_that_lacks_part_of_its_contract(tmp_path, kind, text):
    with pytest.raises(PluginError, match=text):
        build(plugin(tmp_path, kind=kind), kind)


def test_a_gradient_sync_of_its_own_says_what_it_needs_of_autograd(tmp_path):
    """``LocalGradients`` says it for all others."""
    methods = "{name: print for name, each in vars(GradientSync).items() if callable(each)}"
    text = (
        "from nanotrain_core.api.torch import GradientSync, Parallel; "
        f"return type('Mine', (Parallel,), {methods})()"
    )
    register = 'Component(name="mine", provides={"gradient_sync"}, config=Config, '
    wanted = (
        r"Mine without needs_gradient_hooks, reads_dtensors \(see nanotrain_core.api.torch.GradientSync\)"
    )
    with pytest.raises(PluginError, match=wanted):
        build(plugin(tmp_path, kind="parallel", build=text, register=register), "parallel")


def test_a_gradient_sync_that_does_not_say_so_is_refused(tmp_path):
    """Gradients were summed by the core, and conformance passed without a call of it."""
    text = (
        "from nanotrain_core.api.torch import LocalGradients, Parallel; "
        "return type('Mine', (LocalGradients, Parallel), {})()"
    )
    with pytest.raises(PluginError, match=r'would never be called.*add provides=\{"gradient_sync"\}'):
        build(plugin(tmp_path, kind="parallel", build=text), "parallel")


def test_an_heir_that_leaves_out_what_has_no_default_is_told_what(tmp_path):
    """It inherits already: the text names the contract, and what is missing."""
    text = "from nanotrain_core.contracts import Precision; return type('Mine', (Precision,), {})()"
    path = plugin(tmp_path, kind="precision", build=text)
    wanted = r"Mine without parameter_dtype, .*loss_scale \(see nanotrain_core.api.torch.Precision\)"
    with pytest.raises(PluginError, match=wanted):
        build(path, "precision")


@pytest.mark.parametrize(
    ("kind", "base", "method", "meant"),
    [
        ("kernels", "Kernels", "op", "ops"),
        ("monitor", "Monitor", "on_before_updates", "on_before_update"),
        ("parallel", "Parallel", "splits_linears", "splits_linear"),
    ],
)
def test_a_method_that_overrides_none_but_looks_like_it_is_told(tmp_path, kind, base, method, meant):
    """A base class has defaults: the run would go on without it."""
    more = "" if kind != "parallel" else ", 'apply': lambda self, part, placements, mesh: part"
    text = (
        f"from nanotrain_core.api.torch import {base}; "
        f"return type('Mine', ({base},), {{'{method}': lambda self, *_: None{more}}})()"
    )
    wanted = rf"Mine has a method {method}, which nobody ever calls, and not {meant} of {base}: rename it"
    with pytest.raises(PluginError, match=wanted):
        build(plugin(tmp_path, kind=kind, build=text), kind)


def test_a_misspelt_method_of_a_models_config_is_told(tmp_path):
    text = 'Component(name="mine", config=type("Own", (Config,), {"divisibilitys": print}), '
    members = "'layers vocab_size max_length loss_weights build loss_counts flops'.split()"
    path = plugin(
        tmp_path,
        kind="model",
        build=f"return type('Mine', (), dict.fromkeys({members}))()",
        register=text,
    )
    with pytest.raises(PluginError, match=r"Own has a method divisibilitys, .* not divisibility of ModelCon"):
        build(path, "model")


@pytest.mark.parametrize("kind_of", ["property", "functools.cached_property"])
def test_a_property_may_return_the_method(tmp_path, kind_of):
    """As of an object that the component wraps, which may not exist yet: it is not evaluated."""
    text = (
        "import functools; from nanotrain_core.api.torch import Monitor; "
        f"return type('Mine', (Monitor,), {{'on_step': {kind_of}(lambda self: self.inner.on_step)}})()"
    )
    assert not vars(build(plugin(tmp_path, build=text)))


def test_methods_of_ones_own_are_nobodys_business(tmp_path):
    methods = (
        "{'on_steps_': 1, '_on_steps': lambda self: 1, 'on_step': lambda self, r: None, 'publish': print}"
    )
    text = f"from nanotrain_core.api.torch import Monitor; return type('Mine', (Monitor,), {methods})()"
    assert build(plugin(tmp_path, build=text)).publish is print


def test_data_need_only_their_methods_before_they_are_open(tmp_path):
    with pytest.raises(PluginError) as error:
        build(plugin(tmp_path, kind="data"), "data")
    assert "train_batch" in str(error.value)
    assert "vocab_size" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "methods", "text"),
    [
        (
            "monitor",
            "on_step=lambda self: None",
            r"Mine.on_step\(self\) cannot be called: too many positional arguments \(.*mistake.py:\d+\); "
            r"expected on_step\(self, report\); see docs/kinds/monitor.md$",
        ),
        (
            "monitor",
            "on_recover=lambda self, restore, at_least, x: 0",
            r"\(self, restore, at_least, x\) .*'x'",
        ),
        ("monitor", "on_end=lambda: None", r"Mine.on_end\(\) cannot be called: .*on_end\(self, report\)"),
        ("monitor", "meta={}", r"Mine.meta is a dict; expected meta\(self\); see"),
        ("monitor", "on_step=staticmethod(lambda: 0)", r"Mine.on_step\(\) cannot be called: too many"),
        ("monitor", "on_step=torch.no_grad()(lambda self: 0)", r"Mine.on_step\(self\) cannot be called"),
        (
            "parallel",
            "apply=lambda self, part, mesh: part",
            r"expected apply\(self, part, placements, mesh\)",
        ),
        ("optimizer", "step=lambda self: None", r"'loss_scale' .*expected step\(self, \*, loss_scale=...\)"),
        ("optimizer", "step=lambda self, *, loss_scale: None", r"missing a required .*'loss_scale'"),
        (
            "optimizer",
            "initial_state=lambda self: {}",
            r"expected initial_state\(self, weight\); see .*optimiz",
        ),
        (
            "optimizer",
            "carries=lambda self: False",
            r"Mine.carries is a method; expected a property: write @p",
        ),
    ],
)
def test_a_method_that_the_core_could_not_call(tmp_path, kind, methods, text):
    """It had ended the first call of it, hours later perhaps, with a traceback."""
    base = "MasterOptimizer" if kind == "optimizer" else kind.capitalize()
    made = (
        f"import torch; from nanotrain_core.api.torch import {base} as Base; "
        f"return type('Mine', (Base,), dict({methods}))(*[config][:{kind == 'optimizer'}])"
    )
    path = plugin(tmp_path, build=made, kind=kind)
    with pytest.raises(PluginError, match=text) as error:
        build(path, kind)
    assert f"{kind} 'mine' of plugin 'mistake' (mistake.py sha256-" in str(error.value)


@pytest.mark.parametrize(
    "method",
    [
        "lambda self, *args: None",
        "lambda self, anything, more=1, *, key=None: None",
        "staticmethod(lambda report: None)",
        "classmethod(lambda kind, report: None)",
        "print",
        "functools.partial(lambda key, report: None, 1)",
        "functools.partialmethod(lambda self, report, key: None, key=1)",
        "type('Called', (), {'__call__': lambda self, report: None})()",
        "functools.wraps(lambda self: 0)(lambda self, report: None)",
        "functools.lru_cache(lambda self, report: None)",
        "torch.no_grad()(lambda self, report: None)",
        "unittest.mock.Mock()",
        "operator.itemgetter(1)",
    ],
)
def test_whatever_takes_the_arguments_is_a_method(tmp_path, method):
    made = (
        "import functools, operator, torch, unittest.mock; from nanotrain_core.api.torch import Monitor; "
        f"return type('Mine', (Monitor,), {{'on_step': {method}}})()"
    )
    assert build(plugin(tmp_path, build=made))


def test_a_method_that_an_object_was_given_is_compared_too(tmp_path):
    made = (
        "from nanotrain_core.api.torch import Monitor; found = Monitor(); "
        "found.on_step = lambda self, report: None; return found"
    )
    with pytest.raises(PluginError, match=r"Monitor.on_step\(self, report\) cannot be called: .*'report'"):
        build(plugin(tmp_path, build=made))


def test_an_optional_interface_is_compared_where_it_is_there(tmp_path):
    members = "'open train_batch validation_batch describe encode decode meta load_meta'.split()"
    made = (
        "from unittest.mock import Mock; "
        f"return type('Mine', (), {{**dict.fromkeys({members}, Mock()), 'skip': lambda self: 1}})()"
    )
    with pytest.raises(PluginError, match=r"Mine.skip\(self\) .*expected skip\(self, sequences\); .*data.md"):
        build(plugin(tmp_path, kind="data", build=made), "data")


def test_methods_of_a_models_config_are_compared_when_the_plugin_is_loaded(tmp_path):
    text = 'Component(name="mine", config=type("Own", (Config,), {"canonical": lambda self, key: 1}), '
    (broken,) = registry(plugin(tmp_path, kind="model", register=text)).broken
    assert "model 'mine': Own.canonical(self, key) cannot be called: missing a required" in broken.error


def test_the_loss_scale_of_a_precision_is_part_of_its_contract(tmp_path):
    made = (
        "from nanotrain_core.api.torch import Precision; made = Precision(); "
        "made.parameter_dtype = made.gradient_dtype = None; made.loss_scale = 1.0; return made"
    )
    wanted = r"its loss_scale is a float without value, update, meta, load_meta \(see .*torch.LossScale\)"
    with pytest.raises(PluginError, match=wanted):
        build(plugin(tmp_path, kind="precision", build=made), "precision")


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
