"""Imports go one way, plugins know only the core, and the core stays small."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "nanotrain_core"

#: From the ground up. A module imports from its own level and those above it in this list. A name
#: with a star stands for a whole package; any other new module must be given its level here.
LEVELS = (
    (
        "vocabulary",
        "errors files foreign layout actions batch log dtypes memory roles pace random_state "
        "foreign_rope stop timeline saved boxes cover divisibility plain_json watch watch.* weights "
        "weights.shards weights.block_scaled",
    ),
    (
        "placement and mesh",
        "expert_rows host host.* packed placement mesh products routing weight_gradients",
    ),
    (
        "contracts",
        "contracts contracts.* component hookspecs recipe.frozen recipe.locate recipe.tree recipe.types",
    ),
    (
        "mechanisms",
        "conform environment events executor feed fences folder gradients handover "
        "initialise lr_schedule saves model_table weights.foreign_weights",
    ),
    (
        "recipe and registry",
        "catalogues discovery hints local_plugins registry recipe recipe.* weights.* reformat",
    ),
    ("built-ins", "builtin builtin.*"),
    ("engine", "compose measure script show rollback run_info engine"),
    ("launch", "launch launch.*"),
    ("harness", "testing testing.*"),
    ("commands", "cli cli.*"),
)
LEVEL_OF = {name: number for number, (_, names) in enumerate(LEVELS) for name in names.split()}


def module_name(path: Path) -> str:
    """Return the name of a core module without ``nanotrain_core.``; empty for the package itself."""
    return ".".join(path.relative_to(CORE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


MODULES = {module_name(path): path for path in sorted(CORE.rglob("*.py"))}


def level(module: str) -> int | None:
    return LEVEL_OF.get(module, LEVEL_OF.get(module.partition(".")[0] + ".*"))


def imported(path: Path) -> Iterator[str]:
    """Yield the full name of everything a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def core_imports(path: Path) -> set[str]:
    """Return the core modules a file imports; the package's own ``hookimpl`` belongs to everybody."""
    found = set()
    for full in imported(path):
        if full.startswith("nanotrain_core."):
            name = full.removeprefix("nanotrain_core.")
            found.add(name if name in MODULES else name.rpartition(".")[0])
    return found - {""}


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_imports_go_one_way(module):
    own = level(module)
    assert own is not None, f"give {module} its level in LEVELS"
    upward = {other for other in core_imports(MODULES[module]) if level(other) is None or level(other) > own}
    assert not upward, f"{module} ({LEVELS[own][0]}) imports from above: {upward}"


def test_every_level_names_modules_that_exist():
    named = {name for name in LEVEL_OF if not name.endswith("*")}
    assert named <= set(MODULES)


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


#: Folders of the core.
FOLDERS = {path.parent.name for path in CORE.glob("*/__init__.py")}
#: What each part of the core may have of code, in lines; "": all that is in no folder of its own.
SMALL = {
    "recipe": 1140,
    "cli": 960,
    "contracts": 400,
    "host": 350,
    "launch": 650,
    "watch": 250,
    "weights": 550,
    "": 4020,
}


@pytest.mark.parametrize("part", SMALL)
def test_core_without_harness_and_built_in_components_stays_small(part):
    parts = {name: top if (top := name.partition(".")[0]) in FOLDERS else "" for name in MODULES}
    assert {*parts.values()} == {*SMALL, "testing", "builtin"}
    assert sum(code_lines(MODULES[name]) for name in MODULES if parts[name] == part) < SMALL[part]


@pytest.mark.parametrize("path", MODULES.values(), ids=[name or "nanotrain_core" for name in MODULES])
def test_no_file_grows_past_what_one_reads_at_once(path):
    assert code_lines(path) < 300
