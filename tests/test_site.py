"""The documentation as a site: what is generated, and that every link and anchor leads somewhere."""

import re
import subprocess
import sys
from importlib import util

import pytest
from doc_blocks import PAGES, ROOT

from nanotrain_core.command import CORE_COMMANDS
from nanotrain_core.component import KINDS
from nanotrain_core.errors import Exit

SITE = ROOT / "docs/site"


def module(name):
    """Import a module of docs/site, which is no package."""
    spec = util.spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
    found = util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


pages = module("pages")


@pytest.fixture(scope="module")
def generated():
    return pages.generated()


def test_there_is_a_page_for_each_plugin_table_and_command(generated):
    registry = pages.repository_plugins({path.parent.name for path in ROOT.glob("plugins/*/README.md")})
    plugins = {path.name for path in ROOT.glob("plugins/*") if (path / "pyproject.toml").is_file()}
    expected = {f"plugins/{name}.md" for name in plugins}
    expected |= {f"recipe/{name}.md" for name in ("run", "batch", "evaluation", *KINDS)}
    expected |= {f"commands/{name}.md" for name in (*CORE_COMMANDS, *registry.commands())}
    assert set(generated) == expected | {f"{folder}/index.md" for folder in ("plugins", "recipe", "commands")}


def test_plugins_of_others_that_are_installed_have_no_pages():
    found = pages.repository_plugins({"ddp"})
    assert [plugin.name for plugin in found.plugins] == ["builtin", "ddp"]
    assert "tp" not in found.names("parallel")


def test_a_page_of_keys_has_every_key_with_type_default_and_text(generated):
    page = generated["recipe/optimizer.md"]
    adamw = page.partition('`use = "adamw"`')[2].partition("\n## ")[0]
    assert "### `lr` { #adamw-lr }\n\nnumber > 0, <= 1000; default `0.001`.\n\nPeak learning rate." in adamw
    assert "### `betas` { #adamw-betas }\n\nlist of 2 values; default `[0.9, 0.95]`." in adamw
    assert '| `use` | `"constant"` or `"linear"` or `"cosine"` or `"wsd"` | `"constant"` |' in adamw
    assert "### `stage` { #zero12-stage }" in page.partition('`use = "zero12"`')[2]
    assert "provides `gradient_sync`" in page
    assert "### `steps` { #run-steps }\n\ninteger >= 1; must be given." in generated["recipe/run.md"]


def test_a_page_of_a_command_has_its_options(generated):
    assert "| `--set KEY=VALUE` |" in generated["commands/run.md"]
    assert "of [`nanotrain-plan`](../plugins/plan.md)" in generated["commands/plan.md"]
    assert "| `--trace` |" in generated["commands/explain.md"]
    assert "| `verify` `--step N` | which one; default: all |" in generated["commands/ckpt.md"]


def test_a_page_of_a_plugin_is_its_readme_and_what_it_registers(generated):
    page = generated["plugins/tp.md"]
    assert page.startswith("# nanotrain-tp\n")
    assert "| parallel | [`tp`](../recipe/parallel.md#tp) |" in page
    assert "dimensions `tp`" in page


def test_the_checks_of_a_kind_are_those_of_the_harness():
    told = pages.checks_of_kind("schedule")
    assert re.search(r"^\| `loads_without_torch` \| The plugin's module registers", told, re.MULTILINE)
    assert "`every_pass_once" in told or told.count("\n| `") > 8
    assert pages.checks_of_kind("gradient_sync").count("\n| ") == pages.checks_of_kind("parallel").count(
        "\n| "
    )


# --- links ----------------------------------------------------------------------------------------


def slugs(text):
    """Return the fragments of a page's headings, as GitHub and the site make them."""
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", pages.CODE_BLOCK.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", ""))
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return found


def links(text):
    """Return the targets of a page's links to files and headings; code is left out."""
    return re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", pages.CODE.sub("`", text))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    """To a file or folder, and of a page to a heading that it has."""
    for link in links(path.read_text(encoding="utf-8")):
        target, _, fragment = link.partition("#")
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), link
        if fragment and there.suffix == ".md":
            assert fragment in slugs(there.read_text(encoding="utf-8")), link


def test_links_of_generated_pages_lead_somewhere(generated):
    for page, text in generated.items():
        for link in links(text):
            if link.startswith("#"):  # within the page: the build of the site checks these
                continue
            target = (pages.DOCS / page).parent / link.partition("#")[0]
            uri = pages.in_site(target)
            assert uri, (page, link)
            folder = uri.partition("/")[0]
            assert folder not in ("plugins", "recipe", "commands") or uri in generated, (page, link)


def test_every_page_is_in_the_navigation():
    told = set(re.findall(r": (\S+\.md)$", (SITE / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    there = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    assert told == there


def test_links_are_led_to_pages_of_the_site():
    text = (
        "See [tp](../../plugins/tp/README.md#x), [roles](../../nanotrain_core/layout/roles.py), "
        "`[no](link)` and [up](../recipes.md)."
    )
    led, sources = pages.site_links(text, "kinds/model.md")
    assert "(../plugins/tp.md#x)" in led
    assert "(../source/nanotrain_core/layout/roles.py.md)" in led
    assert "`[no](link)`" in led
    assert "(../recipes.md)" in led
    assert sources == {ROOT / "nanotrain_core/layout/roles.py"}


# --- the built site -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("html", "found"),
    [
        ('<script src="https://cdn.example/x.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example/x.css">', True),
        ('<img alt="" src=https://example.org/x.png>', True),
        ('<pre class="mermaid"><code>', True),
        ('<a href="https://example.org/">peer</a> <script src="assets/x.js"></script>', False),
        ('<link rel="canonical" href="https://example.org/">', False),
    ],
)
def test_what_a_page_would_fetch_is_found(tmp_path, html, found):
    (tmp_path / "index.html").write_text(html)
    assert bool(module("offline").fetched(tmp_path)) == found


@pytest.mark.full
def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path):
    """As .ci/run does it."""
    config = ["-f", str(SITE / "mkdocs.yml"), "-d", str(tmp_path / "site")]
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *config]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == Exit.DONE, done.stderr
    for page in ("index", "kinds/optimizer", "recipe/optimizer", "plugins/tp", "commands/plan"):
        assert (tmp_path / f"site/{page}.html").is_file()
    assert "Its conformance checks" in (tmp_path / "site/kinds/optimizer.html").read_text(encoding="utf-8")
    assert module("offline").fetched(tmp_path / "site") == []
