import sys
from pathlib import Path

import pytest
from fake_distribution import PLUGIN, install

from nanotrain_core.component import Component, Support
from nanotrain_core.errors import PluginError
from nanotrain_core.registry.advice import FIRST_PARTY, how_to_install
from nanotrain_core.registry.discovery import PluginArguments, discover
from nanotrain_core.registry.registry import Registry, load_plugins

ROOT = Path(__file__).parents[1]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on ``sys.path``; modules imported from it are forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(folder) in sys.modules[name].__file__:
            del sys.modules[name]


def load(**arguments) -> Registry:
    return Registry(discover(PluginArguments(**arguments)))


def plugin_named(registry, name):
    (found,) = [plugin for plugin in registry.plugins if plugin.name == name]
    return found


def test_built_ins_enter_through_the_same_door():
    registry = load_plugins()
    builtin = plugin_named(registry, "builtin")
    assert builtin.error is None
    assert registry.owner("topology", "grid") is builtin
    assert set(registry.names("optimizer")) >= {"adamw", "sgd"}


def test_plugins_come_sorted_by_name(site):
    for name in ("zeta", "alpha", "mid"):
        install(site, name)
    names = [plugin.name for plugin in load().plugins]
    assert names == sorted(names)
    assert {"alpha", "mid", "zeta"} < set(names)


def test_loading_twice_gives_the_same_registry():
    assert load_plugins() is load_plugins(block=[], local=())


def test_registered_component_is_found_with_its_owner(site):
    install(site, "alpha", version="2.5", core=">=0.1,<0.2")
    registry = load()
    assert registry.get("monitor", "alpha").name == "alpha"
    owner = registry.owner("monitor", "alpha")
    assert (owner.distribution, owner.version) == ("alpha", "2.5")
    assert owner.requires_core in (">=0.1,<0.2", "<0.2,>=0.1")
    assert registry.versions()["alpha"] == "2.5"


def test_a_module_that_is_loaded_again_registers_anew(site):
    """As one that is edited beside a notebook."""
    install(site, "alpha")
    before = load().get("monitor", "alpha").config
    exec(PLUGIN.format(name="beta"), vars(sys.modules["alpha"]))
    registry = load()
    assert "alpha" not in registry.names("monitor")
    assert registry.get("monitor", "beta").config is not before


OBJECT = """
class Hooks:
    __hash__ = None

    @hookimpl
    def nanotrain_register_monitor(self, register):
        nanotrain_register_monitor(register)

plugin = Hooks()
"""


def test_a_plugin_may_be_an_object_without_a_hash(site):
    install(site, "alpha", PLUGIN.format(name="alpha") + OBJECT)
    entries = next(site.glob("alpha-*/entry_points.txt"))
    entries.write_text(entries.read_text().rstrip() + ":plugin\n")
    assert load().get("monitor", "alpha").name == "alpha"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
        (
            PLUGIN.replace("def nanotrain_register_monitor", "def nanotrain_regster_monitor"),
            "register_monitor",
        ),
        (PLUGIN.replace("(register):", "(register, extra=1):"), "'extra' must not have a default"),
        (PLUGIN.replace("(register):", "(regster):"), "regster"),
        (PLUGIN.replace("@hookimpl\n", ""), "lacks @hookimpl"),
        (PLUGIN.replace("frozen=True, ", ""), "frozen attrs class"),
        (PLUGIN.replace("@attrs.define(frozen=True, kw_only=True)", ""), "frozen attrs class"),
        (
            PLUGIN.replace("register_monitor", "register_optimizer"),
            "must derive from nanotrain_core.api.OptimizerConfig",
        ),
        (
            PLUGIN.replace("register_monitor", "register_model"),
            "must derive from nanotrain_core.api.ModelConfig",
        ),
        (PLUGIN.replace("size: int", "size: list[int]"), "Config.size: list[int] is no type of a recipe"),
        (PLUGIN.replace("json:Thing", "json.Thing"), "'module:attribute'"),
        (PLUGIN.replace("{name}", "Not A Name"), "lower-case"),
        (PLUGIN + "\n    1 / 0\n", "ZeroDivisionError"),
        (PLUGIN + PLUGIN.split("(register):")[1], "registered twice"),
        ("", "registers no component"),
    ],
)
def test_broken_plugin_keeps_its_error_and_harms_no_other(site, source, reason):
    install(site, "broken", source.replace("{name}", "thing"))
    install(site, "healthy")
    registry = load()
    assert reason in plugin_named(registry, "broken").error
    assert registry.broken == (plugin_named(registry, "broken"),)
    assert registry.get("monitor", "healthy")


def test_an_entry_point_to_a_module_that_is_not_there_says_where_that_is_written(site):
    install(site, "broken")
    (site / "broken.py").unlink()
    error = plugin_named(load(), "broken").error
    assert 'entry point broken = "broken" of broken: correct it in pyproject.toml, and install' in error
    install(site, "other", "import no_such_module_anywhere")
    assert "entry point" not in plugin_named(load(), "other").error


def test_broken_plugin_is_told_to_who_needs_its_component(site):
    install(site, "broken", PLUGIN.format(name="thing") + "\n    1 / 0\n")
    registry = load()
    with pytest.raises(PluginError, match=r"plugin 'broken' \(broken 1.0\) is broken: ZeroDivisionError"):
        registry.get("monitor", "thing")
    with pytest.raises(PluginError, match=r"broken, see `nanotrain plugins`: broken"):
        registry.get("monitor", "something_else")


def test_unmet_requirement_on_the_core_is_refused_without_importing(site):
    install(site, "future", "raise SystemExit", core=">=7")
    assert "needs nanotrain-core >=7, but 0.1" in plugin_named(load(), "future").error


def test_what_a_component_does_not_support_may_depend_on_its_config():
    declared = {"a": Support.UNSUPPORTED, "b": Support.NOT_IMPLEMENTED, "c": Support.PARTIAL}
    component = Component(
        name="x", config=dict, factory="x:y", supports=declared, supports_for=lambda config: config
    )
    assert component.unsupported({}) == {"a", "b"}
    assert component.unsupported({"a": Support.FULL, "d": Support.UNSUPPORTED}) == {"b", "d"}


def test_same_component_from_two_distributions_names_both(site):
    install(site, "one", PLUGIN.format(name="same"))
    install(site, "two", PLUGIN.format(name="same"), version="2.0")
    registry = load()
    with pytest.raises(PluginError, match=r"one 1\.0.* and .*two 2\.0.*--no-plugin"):
        registry.get("monitor", "same")
    assert len(registry.clashes()) == 1
    assert load(blocked=["two"]).owner("monitor", "same").distribution == "one"


def test_same_entry_point_from_two_distributions_names_both(site):
    install(site, "one", entry="twin")
    install(site, "two", entry="twin")
    registry = load()
    assert [plugin.distribution for plugin in registry.broken] == ["one", "two"]
    assert all("one 1.0 and two 1.0" in plugin.error for plugin in registry.broken)
    assert load(blocked=["one"]).get("monitor", "two")


def test_unknown_name_suggests_lists_and_says_what_to_install():
    registry = load()
    with pytest.raises(
        PluginError, match=r"no optimizer named 'adam' \(did you mean 'adamw'\?\); installed: adamw"
    ):
        registry.get("optimizer", "adam")
    with pytest.raises(PluginError, match=r"no optimizer named 'special'; installed: .*; .* --plugin PATH"):
        registry.get("optimizer", "special")
    how = r"pip install nanotrain-pp-1f1b \(in a checkout: pip install -e plugins/pp_1f1b\)$"
    with pytest.raises(PluginError, match=how):
        Registry(()).get("schedule", "zb_h1")


def test_what_to_install_is_known_of_every_plugin_of_this_project():
    """Each distribution named has its folder; each component and command installed has its distribution."""
    for package in set(FIRST_PARTY.values()):
        folder = how_to_install(package).rpartition("pip install -e ")[2].rstrip(")")
        assert f'\nname = "{package}"\n' in (ROOT / folder / "pyproject.toml").read_text()
    for found in load().plugins:
        if found.distribution.startswith("nanotrain-") and found.distribution != "nanotrain-core":
            names = [(kind, component.name) for kind, component in found.components]
            names += [("command", command.name) for command in found.commands if not command.extends]
            assert {name: FIRST_PARTY.get(name) for name in names} == dict.fromkeys(names, found.distribution)


def test_name_of_another_kind_or_of_a_plugin_is_told_where_it_belongs(tmp_path):
    file = tmp_path / "many.py"
    file.write_text(PLUGIN.format(name="special"))
    registry = load(local=[str(file)])
    with pytest.raises(
        PluginError, match=r"no parallel named 'adamw'; .*; optimizer 'adamw' stands under \[opt"
    ):
        registry.get("parallel", "adamw")
    with pytest.raises(
        PluginError, match=r"no optimizer named 'special'; .*; monitor 'special' stands under \[\[monitor"
    ):
        registry.get("optimizer", "special")
    with pytest.raises(PluginError, match="'many' is a plugin, which offers monitor \"special\""):
        registry.get("parallel", "many")


def test_blocking_an_unknown_plugin_suggests_a_name():
    with pytest.raises(PluginError, match=r"--no-plugin bultin: no such plugin \(did you mean 'builtin'\?\)"):
        load(blocked=["bultin"])


def test_local_file_is_a_plugin_whose_version_follows_its_content(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN.format(name="mine"))
    first = plugin_named(load(local=[str(file)]), "mine")
    assert first.error is None
    assert first.local
    file.write_text(file.read_text() + "\n# changed\n")
    assert plugin_named(load(local=[str(file)]), "mine").version != first.version


def test_local_component_builds_from_its_own_file(tmp_path):
    file = tmp_path / "own.py"
    source = PLUGIN.format(name="own") + "\n\ndef build(config):\n    return config.size + 1\n"
    file.write_text(source.replace('"json:Thing"', 'f"{__name__}:build"'))
    component = load(local=[str(file)]).get("monitor", "own")
    assert component.build(component.config(size=4)) == 5


def test_missing_local_file_is_refused_at_once(tmp_path):
    with pytest.raises(PluginError, match="no such file"):
        load(local=[str(tmp_path / "none.py")])


def test_arguments_are_absolute_so_that_every_rank_means_the_same_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert PluginArguments(local=["a.py"]).local == (str(tmp_path / "a.py"),)
