"""Every block of code in the documentation does what it shows: recipes load, Python runs."""

import json
import re
import shutil
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from doc_blocks import FENCE, PAGES, ROOT, blocks
from safetensors.torch import save_file

from nanotrain_core import RuntimeEngine, api
from nanotrain_core.api import Role, tag
from nanotrain_core.api import torch as torch_api
from nanotrain_core.deprecated import Deprecation
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.recipe import load_recipe
from nanotrain_core.recipe.source import find_recipe
from nanotrain_core.testing import Case, conformance
from nanotrain_core.testing.checks import distributed

#: Programs that examples of alerts call, and that a machine need not have.
STRANGE_PROGRAMS = ("notify-send", "page")


LORA = '[[parallel]]\nuse = "lora"\n[[parallel]]\nuse = "ddp"\n'


STEP = "[run]\nsteps = 1\n[batch]\nsequences = 4\nmicrobatch = 1\nlength = 16\n"


#: What a fragment of a recipe is laid over, where that is not the recipe `laptop`: what is missing there.
SURROUNDINGS = {
    "docs/weights.md": (f'extends = "laptop"\n{LORA}', []),
    "plugins/ep_deepseek/README.md": (
        'extends = "deepseek_4d_small"\n',
        ["run.ranks=4", "topology.tp=1", "topology.pp=1", "schedule.use=accumulate"],
    ),
    "plugins/fp8_deepseek_v3/README.md": ('extends = "laptop"\n', ["precision.use=fp8_deepseek_v3"]),
    "plugins/fsdp/README.md": ('extends = "laptop"\n', ["run.ranks=16", "batch.sequences=64"]),
    "plugins/inspect/README.md": ('extends = "laptop"\n', ["run.ranks=9", "batch.sequences=36"]),
    "plugins/pp_1f1b/README.md": ('extends = "laptop"\n', ["model.layers=8"]),
    "plugins/zero12/README.md": ('extends = "laptop"\nparallel = []\n', []),
    "plugins/deepseek/README.md": (STEP, []),
    "plugins/moe_transformer/README.md": (STEP, []),
}


V3 = ('extends = "deepseek_v3_671b"\n', [])  # whose losses the phases of the page change


MODEL_FROM_WEIGHTS = '[model]\nuse = "transformer"\nlayers = 2\nwidth = 32\nheads = 4\nvocab = 256\n'


def test_every_block_is_one_of_those_that_are_looked_at():
    """What opens a fence closes it, and no block is in a language that nothing here reads."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(FENCE.findall(text)), page
    assert {block.language for block in blocks()} == {"python", "toml", "sh", "text", "yaml"}
    assert len(blocks("python")) > 30
    assert len(blocks("sh")) > 40


# --- recipes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block", [block for block in blocks("toml") if "[project]" not in block.text], ids=str
)
def test_recipes_load(block, tmp_path, monkeypatch):
    """A fragment is laid over a whole recipe: keys, types, and how components fit together are checked."""
    for name in STRANGE_PROGRAMS:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    shutil.copy(find_recipe("laptop"), tmp_path / "base.toml")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/model.toml").write_text(MODEL_FROM_WEIGHTS)
    page = str(block.page.relative_to(ROOT))
    before, overrides = SURROUNDINGS.get(page, ('extends = "laptop"\n', []))
    if block.text.startswith("[[parallel]]"):
        before = before.replace("parallel = []\n", "")
    if "model.mtp_weight" in block.text:
        before, overrides = V3
    whole = re.search(r"^(extends|\[model\])", block.text, re.MULTILINE)
    text = block.text + before if whole and "extends" not in before else block.text
    (tmp_path / "recipe.toml").write_text(text if whole else before + block.text)
    assert load_recipe(tmp_path / "recipe.toml", overrides=overrides)


# --- tasks of lm_eval -----------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_tasks_are_read_by_lm_eval(block, tmp_path, monkeypatch):
    """With the questions that stand beside ``test:``."""
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(tmp_path)
    file, row = re.search(r"test: (\S+) +# (\{.*\})$", block.text, re.MULTILINE).groups()
    Path(file).write_text(row)
    Path("task.yaml").write_text(block.text)
    name = re.search(r"^task: (\S+)$", block.text, re.MULTILINE)[1]
    task = TaskManager(include_path=str(tmp_path)).load([name])["tasks"][name]
    (document,) = task.test_docs()
    question = json.loads(row)
    assert task.doc_to_text(document) == question["question"]
    assert task.doc_to_choice(document) == question["choices"]
    assert task.doc_to_target(document) == question["answer"]


# --- Python ---------------------------------------------------------------------------------------


class Tiny(torch.nn.Module):
    """A model as a script has one."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


class Short(RuntimeEngine):
    """Two steps of what the page says."""

    def fit(self, train_loader, val_loader=None, *, steps):
        assert steps >= 1000
        super().fit(train_loader, val_loader, steps=2)


def surroundings(block, folder):
    """Return the names that a fragment is written for, as the text around it introduces them."""
    loader = [(torch.arange(8).reshape(2, 4) % 8, torch.ones(2, 4, dtype=torch.long))] * 8
    part = torch.nn.Module()
    part.up = tag(torch.nn.Linear(4, 4, bias=False), Role.COLUMN)
    free = {
        **{name: getattr(api, name) for name in api.__all__},
        **{name: getattr(torch_api, name) for name in torch_api.__all__},
        **{"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "attrs": attrs, "Path": Path},
        **{"Deprecation": Deprecation, "Case": Case, "conformance": conformance, "distributed": distributed},
        "check": lambda *args, **options: (
            lambda function: function
        ),  # of the harness: it keeps what it is given
        **{"model": Tiny(), "train_loader": loader, "val_loader": loader},
        **{"part": part, "passes": Passes(), "self": SimpleNamespace(passes=Passes())},
        "config": SimpleNamespace(experts=2, ffn=8, width=4),
    }
    free["Config"] = attrs.make_class("Config", {}, frozen=True, kw_only=True)
    if "use_gemm(module" in block.text and "WideWgrad" in block.text:
        free["WideWgrad"] = torch_api.TorchGEMM
    if block.text.startswith("class Experts"):
        free["self"] = SimpleNamespace()
    (folder / "runs/laptop").mkdir(parents=True)
    losses = {1: 1.0, 2: 0.5}
    lines = [
        {"event": "step", "step": n, "time": n, "loss": loss, "losses": {}} for n, loss in losses.items()
    ]
    (folder / "runs/laptop/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "runs/x/dumps/step-00001000").mkdir(parents=True)
    weights = {"layers.0.attn.q.weight": torch.ones(2, 2)}
    save_file(weights, folder / "runs/x/dumps/step-00001000/gradients.safetensors")
    return free


@pytest.mark.parametrize(
    "block",
    [
        block
        for block in blocks("python")
        if block.marked("file") is None and block.marked("cannot run here") is None
    ],
    ids=str,
)
def test_fragments_of_python_run(block, tmp_path, monkeypatch):
    """Each is executed where the names exist that its text speaks of; scripts train for two steps."""
    monkeypatch.setattr("nanotrain_core.RuntimeEngine", Short)
    with chdir(tmp_path):
        free = surroundings(block, tmp_path)
        exec(compile(block.text, str(block), "exec"), free)
    if "history" in free:
        assert list(free["history"].curves["loss"]) == [(1, 1.0), (2, 0.5)]


def test_what_cannot_run_here_says_why_and_who_runs_it():
    """A marker before a block names the test that does what the block shows."""
    marked = [block for block in blocks("python") if block.marked("cannot run here") is not None]
    assert len(marked) <= 2
    for block in marked:
        (where,) = re.findall(r"(tests/\w+\.py)", block.marker)
        assert (ROOT / where).is_file()


def test_files_of_pages_are_run_by_the_harness():
    """Each is somewhere in tests/test_docs.py, with what proves it."""
    told = (ROOT / "tests/test_docs.py").read_text(encoding="utf-8")
    for block in blocks("python"):
        if (name := block.marked("file")) is not None:
            assert f'"{name}"' in told or f'"{name.removesuffix(".py")}"' in told, name
