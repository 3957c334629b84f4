"""Plugins import the core through nanotrain_core.api and its modules alone."""

import ast
import inspect
import re
import subprocess
import sys
from enum import Enum
from importlib import import_module, util
from pathlib import Path

import attrs
import pytest
from api_modules import API_MODULES as NAMES

from nanotrain_core.batch import Batch

ROOT = Path(__file__).parents[1]
API_MODULES = [import_module(name) for name in NAMES]


def imports_of_the_core(path):
    """Yield (module, name) of everything that a file imports from the core, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "nanotrain_core":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("nanotrain_core"))


PACKAGES = sorted(face.parent for face in ROOT.glob("plugins/*/nanotrain_*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_plugins_of_this_repository_import_from_there_only(package):
    found = {(module, path.name) for path in package.rglob("*.py") for module, _ in imports_of_the_core(path)}
    assert found
    assert {module for module, _ in found} <= {api.__name__ for api in API_MODULES}, sorted(found)


def texts(source):
    """Yield the strings of code that are more than a name, without those that stand alone: docstrings."""
    nodes = [*ast.walk(ast.parse(source))]
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        words = "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
        if id(node) not in alone and " " in words:
            yield words


def test_texts_for_authors_name_the_api_and_no_module_behind_it():
    """An author who follows an error's advice imports what it names. ``testing`` is public too."""
    paths = [*(ROOT / "nanotrain_core").rglob("*.py"), *(each for p in PACKAGES for each in p.rglob("*.py"))]
    private = re.compile(r"(?<!from )(?<!import )\bnanotrain_core\.(?!api\b|testing\b|cli\.main\b)\w+")
    offered = {name for api in API_MODULES for name in api.__all__}
    modules = {path.stem for path in (ROOT / "nanotrain_core").rglob("*.py")} - {"api", "text", "torch"}

    def names_a_module(text):
        pairs = re.findall(r"\b(?<!api\.)([a-z_]+)\.(\w+)", text)
        return private.search(text) or any(m in modules and name in offered for m, name in pairs)

    for path in paths:
        source = path.read_text(encoding="utf-8")
        if names_a_module(source):
            wrong = [text for text in texts(source) if names_a_module(text)]
            assert not wrong, f"{path}: {wrong}"


@pytest.mark.parametrize("api", API_MODULES, ids=lambda api: api.__name__)
def test_an_api_module_lists_what_it_offers_and_everything_is_documented_where_it_is_defined(api):
    assert len(set(api.__all__)) == len(api.__all__)
    for name in api.__all__:
        offered = getattr(api, name)
        if isinstance(offered, type) or callable(offered):
            assert getattr(offered, "__doc__", None) or not getattr(offered, "__module__", "").startswith(
                "nanotrain_core"
            ), f"{name} has no docstring"


def test_no_name_is_in_two_api_modules():
    names = [name for api in API_MODULES for name in api.__all__]
    assert len(set(names)) == len(names)


def test_three_api_modules_do_not_import_torch():
    apis = ", ".join(f"nanotrain_core.{name}" for name in ("api", "api.ranks", "api.text"))
    code = f"import {apis}, sys; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "False"


def site_module(name):
    spec = util.spec_from_file_location(f"site_{name}", ROOT / f"docs/site/{name}.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


names, objects = site_module("names"), site_module("objects")


def test_the_page_of_objects_is_up_to_date():
    told = "docs/objects.md is not what the source says: run `python docs/site/objects.py`"
    assert objects.PAGE.read_text(encoding="utf-8") == objects.page(), told


def test_the_page_of_objects_has_what_classes_have():
    """Fields of an attrs class, a property, and a method as it is called."""
    told = objects.PAGE.read_text(encoding="utf-8").partition("\n### Batch\n")[2].partition("\n### ")[0]
    fields = [field.name for field in attrs.fields(Batch)]
    assert all(f"| `{name}: " in told for name in fields)
    assert "| `length: int` | Tokens of a whole sequence, of which this rank may have a part. |" in told
    assert "| `part(index: int, count: int) -> Batch` |" in told


def test_the_page_of_names_is_up_to_date():
    told = "docs/api.md is not what the source says: run `python docs/site/names.py`"
    assert names.PAGE.read_text(encoding="utf-8") == names.page(), told


@pytest.mark.parametrize("api", API_MODULES, ids=lambda api: api.__name__)
def test_the_page_has_each_name_with_a_sentence_of_its_own(api):
    page = names.PAGE.read_text(encoding="utf-8").partition(f"\n## {api.__name__}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^- \[`(\w+)`\]\(.*<br>\n  (.*)$", page, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(api.__all__)
    short = [name for name, told in rows if len(told.split()) < 3 or told.startswith("See ")]
    assert not short, f"give them a docstring whose first sentence says what they are: {short}"


def parameters_in(text):
    """Return the name of each parameter of a signature on the page, and whether it has a default."""
    args = ast.parse(f"def f{text}: pass").body[0].args
    plain = [*args.posonlyargs, *args.args]
    found = [*zip(plain, [None] * (len(plain) - len(args.defaults)) + args.defaults, strict=True)]
    found += [(args.vararg, None)] if args.vararg else []
    found += [*zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    found += [(args.kwarg, None)] if args.kwarg else []
    assert all(each.annotation for each, _ in found)
    return [(each.arg, bool(default)) for each, default in found]


@pytest.mark.parametrize("api", API_MODULES[:2], ids=lambda api: api.__name__)
def test_the_page_has_each_signature_as_python_reads_it(api):
    """Of functions, and of the constructors of classes, fields of their bases included."""
    read = 0
    for each in names.names_of(api.__name__):
        offered, written = getattr(api, each.name), names.signature(each)
        if isinstance(offered, type) and (not written or written == "(...)" or issubclass(offered, Enum)):
            continue
        if inspect.isfunction(offered) or inspect.isclass(offered):
            read += 1
            python = inspect.signature(offered).parameters.values()
            told = [(found.name, found.default is not found.empty) for found in python]
            assert parameters_in(written) == told, each.name
    assert read > 100


def test_long_lists_of_fields_are_on_the_page_of_objects_alone():
    page = names.PAGE.read_text(encoding="utf-8")
    assert "(../nanotrain_core/component.py)`(...)`<br>" in page
    assert "[Members](objects.md#component)" in page
    assert "| `summary: str = ''` |" in objects.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["Parallel", "Block", "open_simple_weights", "sample_token", "Pending", "DIRECTIONS"]
)
def test_a_name_is_led_to_the_file_that_defines_it(name):
    """Of a class or function as Python says; of aliases and constants, where they are assigned."""
    api = next(api for api in API_MODULES if name in api.__all__)
    (found,) = (each for each in names.names_of(api.__name__) if each.name == name)
    offered = getattr(api, name)
    if inspect.isroutine(offered) or inspect.isclass(offered):
        assert found.path == Path(inspect.getsourcefile(offered))
        assert found.sentence.split()[0] == inspect.getdoc(offered).split()[0]
    else:
        assert re.search(rf"^{name}\b.* = ", found.path.read_text(encoding="utf-8"), re.MULTILINE)
