"""``--plugin`` takes a file, a package or a distribution, and says of anything else what it expected."""

import re

import pytest
from command import nanotrain
from fake_distribution import PLUGIN

from nanotrain_core.errors import Exit, PluginError
from nanotrain_core.registry.discovery import PluginArguments, discover
from nanotrain_core.registry.registry import Registry

PROJECT = """\
[project]
name = "Nanotrain_Box"
version = "0.1.0"
dependencies = ["nanotrain-core{core}"]
[project.entry-points."nanotrain.plugins"]
box = "{module}"
"""

#: Its modules name one another, as those of an installed package do.
THING = """\
from {package} import Config


class Thing:
    def __init__(self, config: Config):
        self.size = config.size
"""


def load(*paths):
    return Registry(discover(PluginArguments(local=[str(path) for path in paths])))


def plugin_named(registry, name):
    (found,) = (plugin for plugin in registry.plugins if plugin.name == name)
    return found


def package(folder, name):
    """Write a package that registers the monitor ``name``, whose factory is in a module of it."""
    (folder / name).mkdir(parents=True)
    source = PLUGIN.format(name=name).replace('"json:Thing"', f'"{name}.thing:Thing"')
    (folder / name / "__init__.py").write_text(source)
    (folder / name / "thing.py").write_text(THING.format(package=name))
    return folder / name


def distribution(folder, module, *, core="", under=""):
    """Write a distribution with that package."""
    path = package(folder / "dist" / under, module)
    (folder / "dist" / "pyproject.toml").write_text(PROJECT.format(core=core, module=module))
    return path


def size_of(registry, monitor):
    component = registry.get("monitor", monitor)
    assert component.has_module()
    return component.build(component.config(size=4)).size


@pytest.mark.parametrize("last", ["", "__init__.py"])
def test_a_package_is_a_plugin(tmp_path, last):
    name = f"box_of_{'file' if last else 'folder'}"
    path = package(tmp_path, name)
    registry = load(path / last)
    info = plugin_named(registry, name)
    assert (info.error, info.distribution, info.local) == (None, name, True)
    assert size_of(registry, name) == 4
    (path / "thing.py").write_text((path / "thing.py").read_text() + "# changed\n")
    assert plugin_named(load(path), name).version != info.version


@pytest.mark.parametrize("under", ["", "src"])
def test_a_distribution_is_a_plugin_without_being_installed(tmp_path, under):
    module = f"box_under_{under or 'root'}"
    distribution(tmp_path, module, core=">=0.1", under=under)
    registry = load(tmp_path / "dist")
    info = plugin_named(registry, "box")
    assert (info.error, info.distribution, info.requires_core) == (None, "nanotrain-box", ">=0.1")
    assert re.fullmatch("sha256-[0-9a-f]{12}", info.version)
    assert size_of(registry, module) == 4


def test_a_distribution_of_another_core_is_refused(tmp_path):
    distribution(tmp_path, "box_of_another_core", core=">=9")
    error = plugin_named(load(tmp_path / "dist"), "box").error
    assert error.startswith("needs nanotrain-core >=9, but ")


def test_a_path_given_twice_is_one_plugin(tmp_path):
    path = package(tmp_path, "box_given_twice")
    assert plugin_named(load(path, f"{path}/"), "box_given_twice").error is None


def test_what_is_installed_too_is_told_to_leave_one_out(tmp_path):
    distribution(tmp_path, "box_here")
    (tmp_path / "other").mkdir()
    distribution(tmp_path / "other", "box_there")
    errors = {info.error for info in load(tmp_path / "dist", tmp_path / "other/dist").broken}
    (error,) = errors
    assert error.endswith("leave out --plugin, or uninstall it")


def test_a_module_whose_name_is_taken_is_refused(tmp_path):
    error = plugin_named(load(package(tmp_path, "json")), "json").error
    assert re.fullmatch(r"module json is there already, at .*json/__init__\.py: rename one", error)


def test_a_package_that_fails_leaves_nothing_behind(tmp_path):
    path = package(tmp_path, "box_mended")
    whole = (path / "__init__.py").read_text()
    (path / "__init__.py").write_text("import box_mended.thing\n")
    assert "cannot import name 'Config'" in plugin_named(load(path), "box_mended").error
    (path / "__init__.py").write_text(whole)
    assert plugin_named(load(path), "box_mended").error is None


EXPECTED = "expected a .py file, a folder with __init__.py, or one whose pyproject.toml names its plugins"


def empty(folder):
    (folder / "it").mkdir()
    return EXPECTED


def around(folder):
    package(folder / "it", "nanotrain_it")
    return f"{EXPECTED}; packages in it: nanotrain_it"


def no_group(folder):
    (folder / "it").mkdir()
    (folder / "it/pyproject.toml").write_text("[project]\nname = 'it'\n")
    return f'its pyproject.toml has no [project.entry-points."nanotrain.plugins"]; {EXPECTED}'


def no_module(folder):
    (folder / "it").mkdir()
    (folder / "it/pyproject.toml").write_text(PROJECT.format(core="", module="gone"))
    return 'nanotrain.plugins: box = "gone": there is no module gone in '


def no_toml(folder):
    (folder / "it").mkdir()
    (folder / "it/pyproject.toml").write_text("[project\n")
    return "it/pyproject.toml: cannot be read: Expected ']'"


def no_table(folder):
    (folder / "it").mkdir()
    (folder / "it/pyproject.toml").write_text("[project]\nentry-points = 3\n")
    return "it/pyproject.toml: entry-points: expected a table, got 3"


def misspelt(folder):
    package(folder, "its")
    return "no such file or folder (did you mean 'its'?)"


@pytest.mark.parametrize("make", [empty, around, no_group, no_module, no_toml, no_table, misspelt])
def test_anything_else_is_told_what_was_expected(tmp_path, make):
    text = make(tmp_path)
    with pytest.raises(PluginError, match=f"^--plugin {tmp_path}/it") as caught:
        load(tmp_path / "it")
    assert text in str(caught.value)


def test_a_package_is_named_as_a_module(tmp_path):
    with pytest.raises(PluginError, match="a-b: a package's folder is named as a module"):
        load(package(tmp_path, "a-b"))


def test_every_rank_trains_with_a_package(tmp_path):
    """The factory is in a module of the package, which each rank imports by itself."""
    path = package(tmp_path, "box_on_ranks")
    (path / "thing.py").write_text(
        "from nanotrain_core.contracts import Monitor\nfrom pathlib import Path\n"
        "class Thing(Monitor):\n    def __init__(self, config): pass\n"
        "    def on_start(self, run): Path(f'seen-{run.mesh.rank}').touch()\n"
    )
    words = ("--nproc", "2", "--set", "run.steps=1", "--set", "monitor=[{use='jsonl'},{use='box_on_ranks'}]")
    done = nanotrain("run", "capstone", *words, "--plugin", "box_on_ranks", cwd=tmp_path)
    assert (done.code, done.err) == (Exit.DONE, "")
    assert sorted(file.name for file in tmp_path.glob("seen-*")) == ["seen-0", "seen-1"]


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path):
    factories = []
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "same.py"
        path.write_text(PLUGIN.format(name=folder).replace('"json:Thing"', 'f"{__name__}:NAME"'))
        with path.open("a") as file:
            file.write(f"\ndef NAME(config): return {folder!r}\n")
        factories.append(load(path).get("monitor", folder))
    assert [component.build(None) for component in factories] == ["one", "other"]
