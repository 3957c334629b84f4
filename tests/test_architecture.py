"""Imports go one way, plugins know only the core, and the core stays small."""

import ast
import io
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "nanotrain_core"

#: From the ground up. A module imports from its own level and those above it in this list. A name
#: with a star stands for what of a room is named nowhere else; what is in no room must be named here.
LEVELS = (
    (
        "vocabulary",
        "errors batch deprecated registry registry.local_plugins watch.* checkpoint checkpoint.box_cover "
        "compile "
        "checkpoint.info checkpoint.run_state checkpoint.tensor_boxes data data.codec data.survey "
        "hf hf.mapping hf.rope layout layout.layout "
        "layout.ranges layout.roles metrics metrics.core metrics.declared metrics.history metrics.report "
        "metrics.of_reports metrics.rows "
        "moe moe.grouped_mm models models.cache models.cross_entropy models.document_attention "
        "models.feed_forward "
        "models.gpu_ops models.head models.norms models.ops models.window optim "
        "pipeline pipeline.actions pipeline.passes pipeline.weight_gradients precision precision.dtypes "
        "recipe.model_config recipe.secrets "
        "recipe.divisibility run run.files run.suggest_run run.folder_owner run.log run.plain_json "
        "run.random_state run.stop run.throughput run.upload run.progress_bar",
    ),
    ("placement, mesh and matrix products", "layout.* metrics.* moe.* optim.grad_norm precision.*"),
    (
        "contracts",
        "contracts.* builtin.configs builtin.transformer_config command component hookspecs moe.rules "
        "recipe.frozen recipe.locate recipe.phase recipe.range_validator recipe.tree recipe.types phases "
        "phases.timeline",
    ),
    (
        "mechanisms",
        "checkpoint.safetensors_files checkpoint.saver layout.initialization optim.lr_schedule "
        "pipeline.annotation pipeline.executor "
        "pipeline.p2p pipeline.simulator run.derived_metrics run.events run.feed run.folder "
        "run.skipped_ranges run.global_metrics run.monitor_collectives run.monitor_failures",
    ),
    (
        "recipe and registry",
        "phases.tables recipe.* registry.* hf.* checkpoint.convert checkpoint.listing compile.cuda_graphs "
        "compile.eager",
    ),
    (
        "built-ins",
        "builtin.* checkpoint.* compile.* data.* models.* monitors.* optim.* pipeline.* layout.grid "
        "precision.loss_scale precision.uniform",
    ),
    ("engine", "compose engine phases.in_run run.* script.*"),
    ("launch", "launch.*"),
    ("harness", "testing.*"),
    ("commands and API", "cli.* api.*"),
)
LEVEL_OF = {name: number for number, (_, names) in enumerate(LEVELS) for name in names.split()}


def module_name(path: Path) -> str:
    """Return the name of a core module without ``nanotrain_core.``; empty for the package itself."""
    return ".".join(path.relative_to(CORE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


MODULES = {module_name(path): path for path in sorted(CORE.rglob("*.py"))}


def level(module: str) -> int | None:
    return LEVEL_OF.get(module, LEVEL_OF.get(module.partition(".")[0] + ".*"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return what a file consists of."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imported(path: Path) -> set[str]:
    """Return the full name of everything a file imports, wherever in the file."""
    found = set[str]()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
def for_types_only(path: Path) -> set[str]:
    """Return the full names that a file imports for the type checker alone."""
    blocks = [
        node for node in nodes_of(path) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    found = [node for block in blocks for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    return {f"{node.module}.{alias.name}" for node in found for alias in node.names}


def core_imports(path: Path, *, types: bool = True) -> set[str]:
    """Return the core modules a file imports; the package's own ``hookimpl`` belongs to everybody.

    With ``types=False`` those alone that it needs when it runs, wherever in the file they are imported.
    """
    found = set()
    for full in imported(path) - (set() if types else for_types_only(path)):
        if full.startswith("nanotrain_core."):
            name = full.removeprefix("nanotrain_core.")
            found.add(name if name in MODULES else name.rpartition(".")[0])
    return found - {""}


def test_imports_go_one_way():
    assert [name for name in MODULES if name and level(name) is None] == [], "give them their level in LEVELS"
    upward = {
        name: above
        for name, path in MODULES.items()
        if name and (above := {other for other in core_imports(path) if level(other) > level(name)})
    }
    assert upward == {}, "these import from above"


def test_every_level_names_modules_that_exist():
    named = {name for name in LEVEL_OF if not name.endswith("*")}
    assert named <= set(MODULES)


def full_name(path: Path) -> str:
    """Return the name by which a module of the core or of a plugin is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    top = next(n for n, part in enumerate(parts) if part.startswith("nanotrain_"))
    return ".".join(parts[top:]).removesuffix(".__init__")


def needed(name: str, path: Path, known: set[str]) -> set[str]:
    """Return the modules of ``known`` that one imports when it runs, with the packages they lie in.

    The ``__init__`` of such a package runs first. That of a module's own packages has begun already.
    """
    found = {
        full if full in known else full.rpartition(".")[0] for full in imported(path) - for_types_only(path)
    }
    packages = {other.rpartition(".")[0] for other in found}
    return (found | {each for each in packages if not f"{name}.".startswith(f"{each}.")}) & known


def test_no_modules_need_one_another_in_a_circle():
    """Also where one hides its import in a function. Otherwise some could only be imported after others."""
    paths = [path for room in (CORE, *ROOT.glob("plugins/*/nanotrain_*")) for path in room.rglob("*.py")]
    named = {full_name(path): path for path in paths}
    missing = {name: needed(name, path, set(named)) for name, path in named.items()}
    del missing["nanotrain_core"]  # all need its `hookimpl`; it imports the engine for `RuntimeEngine`
    while free := {name for name, needs in missing.items() if not needs & missing.keys()}:
        missing = {name: needs for name, needs in missing.items() if name not in free}
    # What is left is in circles, or needs what is.
    assert not missing, {name: sorted(needs & missing.keys()) for name, needs in missing.items()}


def test_the_top_holds_what_is_in_no_room_and_little_else():
    assert len(list(CORE.glob("*.py"))) <= 10


def test_every_room_says_its_idea_in_its_first_line():
    rooms = [path for path in CORE.rglob("*") if path.is_dir() and any(path.glob("*.py"))]
    assert len(rooms) > 20
    for room in rooms:
        text = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
        assert text.partition("\n")[0].endswith("."), f"{room.name}/__init__.py: {text[:80]!r}"


def test_core_imports_no_plugin():
    for path in MODULES.values():
        tops = {name.partition(".")[0] for name in imported(path)}
        assert not {top for top in tops if top.startswith("nanotrain_")} - {"nanotrain_core"}, path


def test_plugins_import_the_core_and_never_each_other():
    packages = sorted(ROOT.glob("plugins/*/nanotrain_*"))
    assert packages
    for package in packages:
        for path in package.rglob("*.py"):
            tops = {name.partition(".")[0] for name in imported(path)}
            assert {top for top in tops if top.startswith("nanotrain_")} <= {
                "nanotrain_core",
                package.name,
            }, path


def test_tests_of_a_plugin_import_the_core_that_plugin_and_what_lies_beside_them():
    """They are run where neither the checkout nor another plugin is. ``importorskip`` is no import."""
    helpers = {path.stem for path in (ROOT / "tests").glob("*.py")}
    for folder in sorted(ROOT.glob("plugins/*/tests")):
        (package,) = (
            path.name for path in folder.parent.glob("nanotrain_*") if path.is_dir() and "." not in path.name
        )
        beside = {path.stem for path in folder.glob("*.py")}
        for path in folder.rglob("*.py"):
            tops = {name.partition(".")[0] for name in imported(path)}
            assert {top for top in tops if top.startswith("nanotrain_")} <= {"nanotrain_core", package}, path
            assert not tops & (helpers - beside), path


def code_lines(path: Path) -> int:
    """Count the lines that hold code: not blank, no comment, no text that stands by itself."""
    lines: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.NEWLINE:
            if any(part.type != tokenize.STRING for part in statement):
                lines.update(n for part in statement for n in range(part.start[0], part.end[0] + 1))
            statement = []
        elif token.type not in silent:
            statement.append(token)
    return len(lines)


#: Rooms of the core.
ROOMS = {path.parent.name for path in CORE.glob("*/__init__.py")}
#: What each room of the core may have of code, in lines; "": all that is in none. Not the harness.
SMALL = {
    "": 947,
    "api": 860,
    "builtin": 533,
    "checkpoint": 981,
    "cli": 1766,
    "compile": 789,
    "contracts": 735,
    "data": 895,
    "hf": 1227,
    "launch": 2488,
    "layout": 1317,
    "models": 892,
    "moe": 513,
    "metrics": 1362,
    "monitors": 1056,
    "optim": 825,
    "phases": 372,
    "pipeline": 630,
    "precision": 730,
    "recipe": 1958,
    "registry": 792,
    "run": 3353,
    "script": 818,
    "watch": 454,
}


def test_arrays_are_written_by_files_that_tell_of_a_full_disk():
    """``ndarray.tofile`` ignores that its last bytes did not fit: a file's ``write`` raises."""
    paths = [
        path
        for folder in ("nanotrain_core", "plugins", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    attributes = (
        (path, node) for path in paths for node in nodes_of(path) if isinstance(node, ast.Attribute)
    )
    assert [f"{path}:{node.lineno}" for path, node in attributes if node.attr == "tofile"] == []


@pytest.mark.parametrize("room", SMALL)
def test_every_room_stays_small(room):
    rooms = {name: top if (top := name.partition(".")[0]) in ROOMS else "" for name in MODULES}
    assert {*rooms.values()} == {*SMALL, "testing"}
    assert sum(code_lines(MODULES[name]) for name in MODULES if rooms[name] == room) < SMALL[room]


def test_no_file_grows_past_what_one_reads_at_once():
    assert [name for name, path in MODULES.items() if code_lines(path) >= 300] == []
