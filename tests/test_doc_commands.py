"""Every command in the documentation takes what it is given; ``-m full`` runs what can run here."""

import importlib.util
import json
import shutil
from contextlib import chdir
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
from command import nanotrain
from doc_blocks import PAGES, ROOT, blocks, commands, file_of

from nanotrain_core.cli import main
from nanotrain_core.command import CORE_COMMANDS
from nanotrain_core.errors import Exit
from nanotrain_core.recipe.source import find_recipe
from nanotrain_core.registry.registry import load_plugins

#: Programs of others that a command begins with. What they do with their words is not ours to check.
OTHERS = {
    "srun",
    "torchrun",
    "kubectl",
    "sbatch",
    "git",
    "echo",
    "printf",
    "tensorboard",
    "mkdocs",
    "./go.sh",
}


COMMANDS = [
    pytest.param(block, words, id=f"{block}:{' '.join(words)[:60]}")
    for block in blocks("sh")
    for words in commands(block)
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a folder with all files of the pages, for commands that are only parsed."""
    folder = tmp_path_factory.mktemp("pages")
    write_files(folder)
    return folder


@pytest.mark.parametrize(("block", "words"), COMMANDS)
def test_commands_take_what_they_are_given(block, words, written, monkeypatch):
    """Options, their values and the recipes that are named exist; ``-m full`` runs what can run here."""
    program, *rest = words
    if program == "srun":
        program, *rest = rest[1:]
    if "nanotrain_core.cli" in rest:
        program, rest = "nanotrain", rest[rest.index("nanotrain_core.cli") + 1 :]
    if program == "nanotrain":
        rest = [word for before, word in pairwise(["", *rest]) if word != ">" and before != ">"]
        seen = parsed(rest, written, monkeypatch)
        word = getattr(seen, "recipe", None)
        if word and not word.startswith(("my.toml", "mine.toml", "lora.toml", "runs/")):
            with chdir(ROOT):
                assert find_recipe(word).exists()
    elif program == "pip":
        files = [word for before, word in pairwise(rest) if before == "-r"]
        assert all((ROOT / name).is_file() for name in files)
    elif program == "python":
        if rest[0] == "-m":
            assert importlib.util.find_spec(rest[1]) or (ROOT / rest[1]).is_dir()
        else:
            assert (ROOT / rest[0]).is_file()
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in rest if not word.startswith("-"))
    else:
        assert program in OTHERS


def test_the_package_of_the_tutorial_is_a_plugin(tmp_path, capsys):
    """Its ``pyproject.toml`` as the page has it, with the page's first plugin as the module."""
    (project,) = [block for block in blocks("toml") if "[project]" in block.text]
    (tmp_path / "pyproject.toml").write_text(project.text)
    (tmp_path / "nanotrain_lion").mkdir()
    (tmp_path / "nanotrain_lion/__init__.py").write_text(file_of("lion.py"))
    assert main(["plugins", "--json", "--plugin", str(tmp_path)]) == Exit.DONE
    (lion,) = [each for each in json.loads(capsys.readouterr().out)["plugins"] if each["name"] == "lion"]
    assert (lion["error"], lion["distribution"]) == (None, "nanotrain-lion")


def write_files(folder):
    """Write every file that some page gives in whole."""
    for block in blocks("python"):
        if (name := block.marked("file")) is not None:
            (folder / name).write_text(block.text)
    (folder / "mine.py").write_text(file_of("lion.py"))
    write_plugin(folder)
    shutil.copytree(ROOT / "docs/examples", folder / "docs/examples")


def write_corpora(folder):
    """Write the files that docs/data.md begins with."""
    for name in ("web", "code"):
        (folder / name).mkdir()
    texts = (json.dumps({"text": page.read_text(encoding="utf-8")}) for page in PAGES[:9])
    (folder / "web/pages.jsonl").write_text("\n".join(texts))
    shutil.copy(Path(__file__), folder / "code/code.py")
    (chats,) = (block.text for block in blocks("text") if block.text.startswith('{"messages"'))
    (folder / "chats.jsonl").write_text(chats)


def prepare_corpora(folder):
    """Prepare them with the page's own commands, which its later ones need: each may be run alone."""
    for block in blocks("sh"):
        for words in commands(block):
            line = " ".join(words)
            prepares = line.startswith(("nanotrain data train-tokenizer ", "nanotrain data prepare "))
            if (
                block.page == ROOT / "docs/data.md"
                and prepares
                and not any(why in line for why in CANNOT_RUN)
            ):
                done = nanotrain(*words[1:], cwd=folder)
                assert done.code == Exit.DONE, done.err


def write_task(folder):
    """Write the task that docs/evaluation.md gives, and its questions."""
    (task,) = (block.text for block in blocks("yaml") if block.text.startswith("task: capitals"))
    (folder / "my_tasks").mkdir()
    (folder / "my_tasks/capitals.yaml").write_text(task)
    (folder / "capitals.jsonl").write_text(task.split("# ")[1].splitlines()[0])


def write_plugin(folder):
    """Write the plugin that docs/new_plugin.md has written."""
    with chdir(folder):
        assert main(["new-plugin", "my_optimizer", "--kind", "optimizer"]) == Exit.DONE


def parsed(words, folder, monkeypatch):
    """Return what the command would be called with: all of ``main``, but for its last line."""
    name, seen = words[0], []
    local = [word for before, word in pairwise(words) if before == "--plugin"]
    with chdir(folder), monkeypatch.context() as patched:
        registry = load_plugins(local=local)
        core = name in CORE_COMMANDS
        own = f"nanotrain_core.cli.{name.replace('-', '_')}"
        modules = [import_module(own) if core else registry.command(name).load()]
        modules += [] if core else [extension.load() for extension in registry.extensions(name)]
        for module in modules:
            patched.setattr(module, "run", lambda args: seen.append(args) or Exit.DONE)
        assert main(words) == Exit.DONE
    return seen[0]


#: Why a command of the pages is parsed only, not run: what it begins with, or has in it -> the reason.
CANNOT_RUN = {
    "srun": "needs a Slurm cluster",
    "torchrun": "needs its hosts named",
    "nanotrain launch": "plugins/launch/tests run it",
    "--serve": "serves until Ctrl-C; plugins/report/tests run it",
    "nanotrain top runs/laptop ": "goes on until Ctrl-C; plugins/report/tests run it",
    "nanotrain chaos": "takes minutes; tests/test_chaos.py runs it",
    "nanotrain doctor": "measures this machine, and fails on some; plugins/doctor/tests run it",
    "SmolLM2": "needs downloaded weights; tests/test_convert_llama.py makes some",
    "--weights llama": "needs downloaded weights; tests/test_convert_run.py makes some",
    "nanotrain convert SmolLM2": "needs downloaded weights",
    "llama/tokenizer.json": "needs downloaded weights; tests/test_own_conversations.py makes some",
    "lora.toml": "needs downloaded weights; tests/test_lora_weights.py makes some",
    "runs/lora": "needs that run; tests/test_lora_weights.py makes one",
    "@ema": "needs a run with averages; tests/test_averaged_weights.py makes one",
    "nanotrain sample runs/deepseek": "needs that run; tests/test_sample_on_layouts.py makes one",
    "nanotrain sample runs/mine --chat": "needs a run on conversations; tests/test_sample_chat.py makes one",
    "nanotrain eval runs/deepseek": "needs that run; tests/test_evaluate_on_layouts.py makes one",
    "--task arc_easy": "downloads questions; plugins/sample/tests run tasks of files",
    "--verify-resume": "trains for minutes; tests/test_capstone.py runs it",
    "s3://": "needs a bucket; plugins/object_store/tests serve one",
    "--prompt -": "reads a pipe; tests/test_sample_command.py writes one",
    "nanotrain ckpt replay": "needs older checkpoints; tests/test_cli_ckpt.py makes some",
    "--resume": "is of a run of its own; tests/test_resume_on_layouts.py and others",
    "nanotrain run recipes/deepseek_4d.toml": "takes 8 ranks; tests/test_recipe_shipped.py runs it",
    "model:mine": "a component of yours",
    "data:mine": "a component of yours",
    "nanotrain new-plugin": "writes files; tests/test_new_plugin.py runs it",
    "--step": "needs that step; tests/test_cli_ckpt.py makes some",
    "runs/learning/": "needs those runs; tests/test_learning.py makes some",
    "--sweep": "plans for minutes; tests/test_plan_sweep.py runs it",
    "--simulate": "plans for minutes; tests/test_simulator.py runs it",
    "corpus_text_document.idx": "needs Megatron's files; plugins/data/tests/test_megatron.py writes some",
}


def runnable():
    """Yield a parameter for each command of ours, once, that is not in :data:`CANNOT_RUN`."""
    seen = set()
    for block in blocks("sh"):
        for words in commands(block):
            line = " ".join(words) + " "
            cannot = line in seen or any(why in line for why in CANNOT_RUN)
            seen.add(line)
            if words[0] == "nanotrain" and not cannot:
                yield pytest.param(words[1:], id=f"{block}:{line[:60]}")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Return a folder with what pages speak of: recipes, files of plugins, and finished runs."""
    folder = tmp_path_factory.mktemp("workplace")
    write_files(folder)
    for name in ("my.toml", "mine.toml"):
        (folder / name).write_text('extends = "laptop"\n[run]\nsteps = 2\n')
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    write_task(folder)
    write_corpora(folder)
    prepare_corpora(folder)
    done = nanotrain("run", "laptop", *SHORT, "--set", "run.folder=runs/laptop", cwd=folder)
    assert (done.code, done.err) == (Exit.DONE, "")
    for name in ("mine", "x", "y", "a", "b", "low_lr", "high_lr"):
        shutil.copytree(folder / "runs/laptop", folder / "runs" / name)
    return folder


#: What a page trains for minutes, a test trains for two steps. The checks of components that pages give in
#: whole are run by tests/test_docs.py: here they are listed.
SHORT = ("--set", "run.steps=2", "--set", "evaluation.every=0", "--set", "evaluation.sequences=4")


@pytest.mark.full
@pytest.mark.parametrize("words", list(runnable()))
def test_commands_do_what_they_say(words, workplace):
    if ">" in words:
        words = words[: words.index(">")]
    more = SHORT if words[0] == "run" else ()
    if words[0] == "conformance":
        more = ("--list",)
    done = nanotrain(*words, *more, cwd=workplace)
    assert done.code == Exit.DONE, done.err


def test_reasons_not_to_run_a_command_are_of_commands_that_there_are():
    lines = "\n".join(" ".join(words) + " " for block in blocks("sh") for words in commands(block))
    assert [why for why in CANNOT_RUN if why not in lines] == []
