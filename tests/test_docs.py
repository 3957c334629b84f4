"""The documentation says what the code does."""

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import attrs
import pytest
from command import nanotrain

from nanotrain_core import hookspecs
from nanotrain_core.cli.metrics import by_group, markdown
from nanotrain_core.component import KINDS, Component
from nanotrain_core.errors import Exit
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing import Case, failures, trials

ROOT = Path(__file__).parents[1]
PLUGINS = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")

HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("nanotrain_register_")}


def test_there_is_a_hook_for_every_kind_and_one_for_commands():
    assert set(HOOKS) == {f"nanotrain_register_{kind}" for kind in (*KINDS, "command")}


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_has_a_heading_with_its_signature(name):
    signature = ", ".join(inspect.signature(HOOKS[name]).parameters)
    assert f"### `{name}({signature})`" in PLUGINS


def test_every_field_of_a_component_is_explained():
    for field in Component.__attrs_attrs__:
        assert re.search(rf"^\|.*`{field.name}`", PLUGINS, re.MULTILINE), field.name


def write_example(folder, name, old="", new=""):
    """Write a file of the documentation, ``old`` in it replaced by ``new``; return its path."""
    (source,) = re.findall(rf"<!-- file: {name} -->\n```python\n(.*?)```", PLUGINS, re.DOTALL)
    assert old in source
    (folder / name).write_text(source.replace(old, new))
    return str(folder / name)


def failed(case, *labels):
    """Run the checks of those labels, or all that there are, and return what failed."""
    chosen = [trial for trial in trials(case) if not labels or trial.label in labels]
    assert len(chosen) >= max(1, len(labels))
    return {label: str(error) for label, error in failures(chosen).items()}


WITH_DDP = {"overrides": {"parallel": [{"use": "ddp"}]}}
LEARNED = {"positions": "learned", "max_length": 16, "norm": "layernorm", "activation": "gelu", "bias": True}


@pytest.mark.parametrize(
    ("topology", "options"),
    [({"tp": 2}, {}), ({"tp": 2}, {"overrides": {"model": LEARNED}}), ({"dp": 2, "tp": 2}, WITH_DDP)],
    ids=["tp", "biases", "with_ddp"],
)
def test_the_wrapper_of_the_documentation_has_the_gradients_of_one_process(tmp_path, topology, options):
    plugins = [write_example(tmp_path, "mini_tp.py")]
    case = Case("parallel", use="mini_tp", topology=topology, plugins=plugins, **options)
    assert failed(case, "gradients_equal[fp64]") == {}


@pytest.mark.full
@pytest.mark.parametrize(("topology", "options"), [({"tp": 2}, {}), ({"dp": 2, "tp": 2}, WITH_DDP)])
def test_the_wrapper_of_the_documentation_passes_every_check(tmp_path, topology, options):
    plugins = [write_example(tmp_path, "mini_tp.py")]
    assert failed(Case("parallel", use="mini_tp", topology=topology, plugins=plugins, **options)) == {}


def test_a_wrapper_whose_work_a_precision_would_undo_is_found(tmp_path):
    hook = "module.register_forward_pre_hook(lambda module, args: (SumGradient.apply(args[0], mesh),))"
    method = "module.forward = lambda x, plain=module.forward: plain(SumGradient.apply(x, mesh))"
    plugins = [write_example(tmp_path, "mini_tp.py", hook, method)]
    case = Case("parallel", use="mini_tp", topology={"tp": 2}, plugins=plugins)
    found = failed(case, "gradients_equal[fp64]", "a_precision_may_replace_modules")
    assert set(found) == {"a_precision_may_replace_modules"}
    assert (
        "must be a hook: see nanotrain_core.layout.roles.replace" in found["a_precision_may_replace_modules"]
    )


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("tag.role is Role.INNER", "False", "layers.0.attn.q.inner.weight"),
        ("tag.role in (Role.COLUMN, Role.SHARED)", "tag.role is Role.COLUMN", "embed.weight: rank 1"),
    ],
    ids=["inner", "shared"],
)
def test_the_wrapper_of_the_documentation_knows_what_lies_between_linears(tmp_path, old, new, where):
    """It did not, and passed every check: the model that it was tested with has neither."""
    label = "inner_shared_and_biased_layers"
    case = Case("parallel", use="mini_tp", topology={"tp": 2})
    now = write_example(tmp_path, "mini_tp.py")
    assert failed(attrs.evolve(case, plugins=[now]), label) == {}
    (tmp_path / "old").mkdir()
    before = write_example(tmp_path / "old", "mini_tp.py", old, new)
    found = failed(attrs.evolve(case, plugins=[before]), "gradients_equal[fp64]", label)
    assert set(found) == {label}
    assert where in found[label]


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        ("model", "bigram"),
        ("data", "counting"),
        pytest.param("kernels", "lean", marks=pytest.mark.full),
        ("monitor", "agreement"),
    ],
)
def test_the_small_examples_pass_every_check(tmp_path, kind, use):
    assert failed(Case(kind, use=use, plugins=[write_example(tmp_path, f"{use}.py")])) == {}


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param({"dp": 2}, id="dp"),
        pytest.param({"dp": 2, "pp": 2}, marks=pytest.mark.full, id="tied over pp"),
    ],
)
def test_the_gradient_sync_of_the_documentation_passes_every_check(tmp_path, topology):
    plugins = [write_example(tmp_path, "narrow_ddp.py")]
    around = {"model": {"tied": True}, "schedule": {"use": "1f1b"}} if "pp" in topology else {}
    case = Case(
        "parallel", use="narrow_ddp", config={"dtype": "float64"}, topology=topology, overrides=around
    )
    assert failed(attrs.evolve(case, plugins=plugins)) == {}


def test_the_table_of_metrics_is_that_of_the_installed_plugins():
    """Write it anew with ``python tests/test_docs.py``."""
    text = METRICS.read_text(encoding="utf-8")
    assert text == with_table(text)


METRICS = ROOT / "docs/metrics.md"


def with_table(text):
    begin, end = "<!-- begin: nanotrain metrics --markdown -->\n", "<!-- end -->"
    before, _, rest = text.partition(begin)
    table = markdown(by_group(load_plugins()))
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


DOORS = ("nanotrain_core.api", "nanotrain_core.api.torch")


@pytest.mark.parametrize("door", DOORS)
def test_what_to_import_from_where_is_there(door):
    table = PLUGINS.partition(f"\n### `{door}`\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| [\w ,]+ \| (.*`.+) \|$", table, re.MULTILINE)
    assert len(rows) >= 10
    for name in re.findall(r"`(\w+)`", " ".join(rows)):
        assert name == "register" or name in import_module(door).__all__, name


def test_examples_of_plugins_import_from_there_alone():
    for block in re.findall(r"```python\n(.*?)```", PLUGINS, re.DOTALL):
        found = re.findall(r"^\s*(?:from|import) (nanotrain_core[\w.]*)", block, re.MULTILINE)
        assert set(found) <= {*DOORS, "nanotrain_core.testing"}, block


def test_what_is_said_to_be_torch_free_is():
    code = "import sys, nanotrain_core.api, nanotrain_core.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_plugin_of_the_tutorial_trains(tmp_path):
    write_example(tmp_path, "lion.py")
    words = ("--plugin", "lion.py", "--set", "optimizer.use=lion", "--set", "optimizer.lr=3e-3")
    done = nanotrain("run", "capstone", "--nproc", "1", *words, cwd=tmp_path)
    assert (done.code, done.err) == (Exit.DONE, "")
    losses = [float(found) for found in re.findall(r"^ +\d+/20 +(\S+)", done.out, re.MULTILINE)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("page", ["architecture.md", "glossary.md"])
def test_files_that_a_page_names_are_there(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    linked = re.findall(r"\[`([\w./]+)`\]\(([^)#]+)\)", text)
    assert all(name == "nanotrain_core.api" or name.rstrip("/") in target for name, target in linked)
    plain = set(re.findall(r"`([\w./]+\.py)`", text)) - {name for name, _ in linked}
    assert len(linked) > 10
    for name in plain:
        assert (ROOT / name).is_file() or (ROOT / "nanotrain_core" / name).is_file(), name


def test_the_architecture_page_has_every_room():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in ROOT.glob("nanotrain_core/*/__init__.py")}
    assert set(re.findall(r"^\| \[`(\w+)/`\]", text, re.MULTILINE)) == rooms


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))], ids=lambda path: path.name
)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


if __name__ == "__main__":
    METRICS.write_text(with_table(METRICS.read_text(encoding="utf-8")), encoding="utf-8")
