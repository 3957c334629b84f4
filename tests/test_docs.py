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
from doc_blocks import file_of

from nanotrain_core import contracts, hookspecs
from nanotrain_core.cli.metrics import by_group, markdown
from nanotrain_core.component import KINDS, Component
from nanotrain_core.errors import Exit
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing import Case, failures, trials
from nanotrain_core.testing.case import HARNESS
from nanotrain_core.testing.chaos import matrix

ROOT = Path(__file__).parents[1]
PLUGINS = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
KIND_PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/kinds/*.md"))}

HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("nanotrain_register_")}


def test_there_is_a_hook_for_every_kind_and_one_for_commands():
    assert set(HOOKS) == {f"nanotrain_register_{kind}" for kind in (*KINDS, "command")}


@pytest.mark.parametrize("kind", [*KINDS, "gradient_sync", "command"])
def test_every_kind_has_a_page_with_its_hook_contract_example_and_proof(kind):
    page = KIND_PAGES[kind]
    for name in re.findall(r"`(nanotrain_register_\w+)\(", page.partition("\n## ")[0]):
        signature = ", ".join(inspect.signature(HOOKS[name]).parameters)
        assert f"`{name}({signature})`" in page
    assert kind == "gradient_sync" or f"nanotrain_register_{kind}(" in page.partition("\n## ")[0]
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert {"Contract", "Example", "Test it"} <= set(headings)
    assert "<!-- file: " in page
    assert f"](kinds/{kind}.md)" in PLUGINS


CONTRACTS = {
    "topology": contracts.Topology,
    "kernels": contracts.Kernels,
    "model": contracts.Model,
    "parallel": contracts.Parallel,
    "gradient_sync": contracts.GradientSync,
    "precision": contracts.Precision,
    "optimizer": contracts.Optimizer,
    "schedule": contracts.Schedule,
    "checkpoint": contracts.Checkpoint,
    "data": contracts.Data,
    "monitor": contracts.Monitor,
}


@pytest.mark.parametrize("kind", CONTRACTS)
def test_the_contract_of_a_page_has_every_method_with_its_arguments(kind):
    """Methods in tables with their arguments by name; attributes by name."""
    section = KIND_PAGES[kind].partition("\n## Contract\n")[2]
    contract = CONTRACTS[kind]
    members = {*vars(contract), *getattr(contract, "__annotations__", {})}
    public = {name for name in members if not name.startswith("_")}
    assert public
    for name in sorted(public):
        value = inspect.getattr_static(contract, name, None)
        assert re.search(rf"`{name}\b", section), name
        if inspect.isfunction(value):
            wanted = [each for each in inspect.signature(value).parameters if each != "self"]
            for told in re.findall(rf"^\|[^|]*`{name}\(([^)`]*)\)`", section, re.MULTILINE) or [""]:
                assert [word.strip(" .=") for word in told.split(",") if word] == wanted, name


def test_every_field_of_a_component_is_explained():
    for field in Component.__attrs_attrs__:
        assert re.search(rf"^\|.*`{field.name}`", PLUGINS, re.MULTILINE), field.name


def write_example(folder, name, old="", new=""):
    """Write a file of the documentation, ``old`` in it replaced by ``new``; return its path."""
    source = file_of(name)
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


@pytest.mark.full_cases("with_ddp")
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


@pytest.mark.full
def test_a_wrapper_whose_work_a_precision_would_undo_is_found(tmp_path):
    hook = "module.register_forward_pre_hook(lambda module, args: (SumGradient.apply(args[0], mesh),))"
    method = "module.forward = lambda x, plain=module.forward: plain(SumGradient.apply(x, mesh))"
    plugins = [write_example(tmp_path, "mini_tp.py", hook, method)]
    case = Case("parallel", use="mini_tp", topology={"tp": 2}, plugins=plugins)
    found = failed(case, "gradients_equal[fp64]", "a_precision_may_replace_modules")
    assert set(found) == {"a_precision_may_replace_modules"}
    assert "must be a hook: see nanotrain_core.api.replace_module" in found["a_precision_may_replace_modules"]


@pytest.mark.full_cases("shared")
@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("tag.role is Role.INNER", "False", "layers.0.attn.q.inner.weight"),
        ("tag.role in (Role.COLUMN, Role.SHARED)", "tag.role is Role.COLUMN", "embed.weight: rank 1"),
        (", requires_grad=old.requires_grad)", ")", "unexpected ['layers.0.attn.q.column.bias'"),
    ],
    ids=["inner", "shared", "frozen"],
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


def test_a_position_of_another_length_is_asked_of_data_that_takes_even_lengths(tmp_path):
    plugin = Path(write_example(tmp_path, "counting.py"))
    text = plugin.read_text().replace('"0 1 2 3 ..."', '"even", check=check')
    text = text.replace("self.first_held_out =", "assert length % 2 == 0; self.first_held_out =")
    plugin.write_text(text + CHECK_OF_EVEN_LENGTHS)
    case = Case("data", use="counting", plugins=[str(plugin)])
    assert failed(case, "fingerprint_tells[length]") == {}


CHECK_OF_EVEN_LENGTHS = """

def check(recipe, config, layout):
    from nanotrain_core.api import Problem

    if recipe.batch.length % 2:
        yield Problem("batch.length", "expected an even number")
"""


@pytest.mark.full_cases("data-counting", "monitor-agreement")
@pytest.mark.parametrize(
    ("kind", "use"),
    [
        ("model", "bigram"),
        ("data", "counting"),
        pytest.param("kernels", "lean", marks=pytest.mark.full),
        ("monitor", "agreement"),
        pytest.param("optimizer", "rmsprop", marks=pytest.mark.full),
        pytest.param("optimizer", "heavy_ball", marks=pytest.mark.full),
        pytest.param("precision", "wide_wgrad", marks=pytest.mark.full),
    ],
)
def test_the_small_examples_pass_every_check(tmp_path, kind, use):
    assert failed(Case(kind, use=use, plugins=[write_example(tmp_path, f"{use}.py")])) == {}


@pytest.mark.parametrize(
    ("kind", "use", "topology", "label"),
    [
        ("optimizer", "rmsprop", {}, "resume_is_bit_equal"),
        ("optimizer", "heavy_ball", {}, "loss_scale_divides_out"),
        ("precision", "wide_wgrad", {}, "every_weight_has_its_gradient"),
        ("checkpoint", "one_file", {}, "every_bit_comes_back"),
    ],
)
def test_what_an_example_shows_first(tmp_path, kind, use, topology, label):
    case = Case(kind, use=use, topology=topology, plugins=[write_example(tmp_path, f"{use}.py")])
    assert failed(case, label) == {}


WITH_SUMMED = {"overrides": {"parallel": [{"use": "summed"}]}}


@pytest.mark.full_cases("topology-flat-topology0-options0")
@pytest.mark.parametrize(
    ("kind", "use", "topology", "options"),
    [
        ("topology", "flat", {"dp": 2, "tp": 2}, {}),
        pytest.param("schedule", "my_gpipe", {"pp": 2}, {}, marks=pytest.mark.full),
        pytest.param("optimizer", "rmsprop", {"dp": 2}, WITH_SUMMED, marks=pytest.mark.full),
        pytest.param("checkpoint", "one_file", {"dp": 2}, WITH_SUMMED, marks=pytest.mark.full),
    ],
)
def test_the_examples_on_several_ranks_pass_every_check(tmp_path, kind, use, topology, options):
    plugins = [write_example(tmp_path, f"{use}.py")]
    assert failed(Case(kind, use=use, topology=topology, plugins=plugins, **options)) == {}


def test_the_command_of_the_documentation_prints_a_table(tmp_path):
    plugin = write_example(tmp_path, "keys.py")
    done = nanotrain("keys", "laptop", "batch", "--plugin", plugin, cwd=tmp_path)
    assert (done.code, done.err) == (Exit.DONE, "")
    assert re.search(r"^sequences = \d+$", done.out, re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize(
    "topology",
    [pytest.param({"dp": 2}, id="dp"), pytest.param({"dp": 2, "pp": 2}, id="tied over pp")],
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


API_MODULES = ("nanotrain_core.api", "nanotrain_core.api.torch")


def test_what_to_import_from_where_is_there():
    """Each module's row names examples of what it has; docs/api.md has all."""
    table = PLUGINS.partition("\n## What to import from where\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| [\w` ]+ \| (.*) \|$", table, re.MULTILINE)
    assert [module for module, _ in rows][:2] == list(API_MODULES)
    assert len(rows) == 6
    for module, text in rows:
        outside_links = re.sub(r"\[.*?\]\(.*?\)", "", text)
        for name in re.findall(r"`(\w+)`", outside_links):
            assert name in import_module(module).__all__, (module, name)


def test_examples_of_plugins_import_from_there_alone():
    pages = "\n".join([PLUGINS, *KIND_PAGES.values()])
    for block in re.findall(r"```python\n(.*?)```", pages, re.DOTALL):
        found = re.findall(r"^\s*(?:from|import) (nanotrain_core[\w.]*)", block, re.MULTILINE)
        assert set(found) <= {*API_MODULES, "nanotrain_core.testing"}, block


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


@pytest.mark.parametrize("kind", KINDS)
def test_pages_name_the_built_in_components(kind):
    registry = load_plugins()
    names = [name for name in registry.names(kind) if registry.owner(kind, name).name == "builtin"]
    architecture = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = [
        re.search(rf"^\| {kind} \|.*\| ([^|]+) \|$", architecture, re.MULTILINE),
        re.search(r"^\| built in \| ([^|]+) \|$", KIND_PAGES[kind], re.MULTILINE),
    ]
    for row in rows:
        assert row is not None
        assert not set(names) - set(re.findall(r"`(\w+)`", row[1]))


def test_the_page_on_testing_names_what_the_harness_has():
    text = (ROOT / "docs/testing.md").read_text(encoding="utf-8")
    own = {(k, n) for registry in [load_plugins()] for k in KINDS for n in registry.names(k)}
    registry = load_plugins(local=(HARNESS,))
    every = {(k, n) for k in KINDS for n in registry.names(k)}
    components = {name for _, name in every - own}
    assert components
    assert not {name for name in components if f"`{name}`" not in text}
    checks = {path.name for path in (ROOT / "nanotrain_core/testing/checks").glob("*.py")}
    of_kinds = {"__init__.py", *(f"{kind}.py" for kind in KINDS)}
    assert not {name for name in checks - of_kinds if f"`{name}`" not in text}


@pytest.mark.parametrize("plugin", ["data", "deepseek", "sample"])
def test_the_files_of_a_plugin_are_those_of_its_page(plugin):
    folder = ROOT / "plugins" / plugin
    table = (folder / "README.md").read_text(encoding="utf-8").partition("\n| file | contents |\n")[2]
    named = set(re.findall(r"`(\w+\.py)`", table.partition("\n\n")[0]))
    (package,) = folder.glob("nanotrain_*")
    assert named == {path.name for path in package.glob("*.py")} - {"__init__.py"}


def test_rows_of_the_fault_matrix_that_end_differently_are_named():
    text = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    (rows,) = re.findall(r"^The runs in rows ([\d, and]+) of its table end differently", text, re.MULTILINE)
    assert set(re.findall(r"\d+", rows)) == {row.number for row in matrix.ROWS if not row.same_end}


def test_every_sentence_about_health_has_a_row():
    """Its beginning, with numbers and names in the place of ``N`` and of words in capitals."""
    text = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
    table = text.partition("\n| it begins with |")[2].partition("\n\n")[0]
    first = [cell for row in table.splitlines()[2:] for cell in re.split("[,;] ", row.split(" | ")[0][2:])]
    patterns = [re.sub(r"[A-Z]{2,}|N%|N|\\\.\\\.\\\.", ".+", re.escape(cell)) for cell in first]
    metrics = [
        metric for use in ("health", "moe", "probes") for metric in load_plugins().get("monitor", use).metrics
    ]
    rules = [metric.rule for metric in metrics if metric.rule]
    said = {re.sub(r"{\w+}", "7", text) for rule in rules for text in (rule.low, rule.high) if text}
    assert len(said) > 20
    assert [each for each in sorted(said) if not any(re.match(p, each) for p in patterns)] == []


if __name__ == "__main__":
    METRICS.write_text(with_table(METRICS.read_text(encoding="utf-8")), encoding="utf-8")
