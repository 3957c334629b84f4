"""The benchmark of a GPU, where there is none: whatever a part does, the others are measured and told of."""

import json
import os
import select
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from gpu_parts import leaves
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8

from benchmarks.__main__ import main
from benchmarks.gpu import bars, command, fp8_kernels, gpu_tests, only_gpu_tests, process, races
from benchmarks.gpu.fp8_kernels import TINY, agreement
from benchmarks.gpu.parts import Part
from benchmarks.gpu.plain import NanoGPT
from benchmarks.gpu.records import Recorder, read, told
from benchmarks.gpu.result import Done, Result
from benchmarks.gpu.settings import Settings

ROOT = Path(__file__).parents[1]


def parts(*names):
    return tuple(Part(name, name, f"gpu_parts:{name}", 0, 3 if name == "hangs" else 60) for name in names)


# --- the command ----------------------------------------------------------------------------------------


def test_whatever_a_part_does_the_others_are_measured_and_told_of(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "MACHINE", parts("machine")[0])
    late = Part("late", "late", "gpu_parts:well", 1e6, 1e6)
    names = ("raises", "killed", "hangs", "partly", "well", "misses")
    monkeypatch.setattr(command, "PARTS", (*parts(*names), late))
    page = tmp_path / "page.md"
    page.write_text("<!-- gpu: begin -->\n<!-- gpu: end -->\n")
    code = main(["gpu", "--folder", str(tmp_path / "out"), "--markdown", str(page)])
    assert code == 1
    found = json.loads((tmp_path / "out/result.json").read_text())
    ends = {part["name"]: (part["ran"], part["ended"]) for part in found["parts"]}
    assert ends == {
        "raises": (True, "ended with exit code 1"),
        "killed": (True, "ended with SIGKILL"),
        "hangs": (True, "was ended after its 3 s"),
        "partly": (True, ""),
        "well": (True, ""),
        "misses": (True, ""),
        "late": (False, ends["late"][1]),
    }
    assert ends["late"][1].startswith("no time: 5")
    rows = [record["cells"] for part in found["parts"] for record in part["records"] if "cells" in record]
    assert [row["ours"] for row in rows] == ["4", "5", "6", "3", "2"]
    logs = {part["name"]: part["log"] for part in found["parts"]}
    assert logs["raises"].endswith("RuntimeError: out of memory")
    assert "in hangs" in logs["hangs"]  # where it was
    measured = {row["bar"]: (row["measured"], row["passed"]) for row in found["bars"]}
    assert measured[bars.BARS["llama"].name] == ("1.06", True)
    assert measured[bars.BARS["memory"].name] == ("1.01", False)
    assert measured[bars.BARS["gpt2"].name] == ("not run: first: ValueError: line 1", None)
    assert measured[bars.BARS["wide"].name] == ("not run: part wide was not asked for", None)
    assert len(measured) == len(bars.BARS)
    text = page.read_text()
    assert text.strip() == f"<!-- gpu: begin -->\n{capsys.readouterr().out.strip()}\n<!-- gpu: end -->"
    assert "- first:\n      ValueError: line 1\n      wrong size" in text


def test_all_that_passes_ends_with_0_and_no_device_with_a_line(tmp_path, monkeypatch, capsys):
    words = ["gpu", "--folder", str(tmp_path)]
    monkeypatch.setattr(command, "MACHINE", parts("machine")[0])
    monkeypatch.setattr(command, "PARTS", parts("well"))
    assert main(words) == 0
    capsys.readouterr()
    monkeypatch.setattr(command, "MACHINE", parts("no_machine")[0])
    assert main(words) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.splitlines()[-1]) == ("", "gpu cannot run: there is no GPU")


def test_what_a_command_leaves_when_it_is_killed_says_which_parts_had_not_begun(tmp_path):
    found = Result(["gpu"], "a commit", machine={"device": "none"}, asked=["llama", "gpt2"])
    found.parts.append(Done("llama", ended="was under way"))
    found.write(tmp_path)
    measured = {
        row["bar"]: row["measured"] for row in json.loads((tmp_path / "result.json").read_text())["bars"]
    }
    assert measured[bars.BARS["llama"].name] == "not run: was under way"
    assert measured[bars.BARS["gpt2"].name] == "not run: its turn had not come"
    assert measured[bars.BARS["wide"].name] == "not run: part wide was not asked for"


def test_a_second_command_runs_what_the_first_had_no_time_for(tmp_path, monkeypatch, capsys):
    words = ["gpu", "--folder", str(tmp_path)]
    monkeypatch.setattr(command, "MACHINE", parts("machine")[0])
    late = Part("partly", "", "gpu_parts:misses", 1e6, 60)
    monkeypatch.setattr(command, "PARTS", (*parts("well", "raises"), late))
    assert main(words) == 1
    again = Part("well", "", "gpu_parts:killed", 0, 60)  # which is not run a second time
    monkeypatch.setattr(command, "PARTS", (again, *parts("raises", "partly")))
    assert main([*words, "--missing"]) == 1
    found = json.loads((tmp_path / "result.json").read_text())
    ends = [(part["name"], part["ran"], part["ended"]) for part in found["parts"]]
    assert ends == [("well", True, ""), ("raises", True, "ended with exit code 1"), ("partly", True, "")]
    logs = (tmp_path / "log.txt").read_text()
    assert [logs.count(f"=== {name}, ") for name in ("well", "raises", "partly")] == [1, 2, 1]
    monkeypatch.setattr(
        command, "PARTS", (*parts("raises", "partly"), attrs.evolve(again, function="gpu_parts:well"))
    )
    assert main([*words, "--missing", "well"]) == 1  # run again, and no other part
    found = json.loads((tmp_path / "result.json").read_text())
    assert [part["name"] for part in found["parts"]] == ["partly", "well"]
    assert found["parts"][1]["records"] != []
    monkeypatch.setattr(command, "commit", lambda: "another")
    assert main([*words, "--missing"]) == 1
    assert "this is another: give another --folder" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 3])
def test_what_a_part_has_started_ends_with_it(tmp_path, code):
    pipe = tmp_path / "held"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    ended = process.alone(partial(leaves, pipe, code), tmp_path / "log", 60, process.context())
    assert ended == (f"ended with exit code {code}" if code else "")
    assert select.select([reader], [], [], 20)[0]  # nobody has the other end any more
    assert os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lama"], "no part named lama; there are llama, gpt2, "),
        (["--nanogpt", "."], "--nanogpt . has no model.py: it is no clone of nanoGPT"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(words, said, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        main(["gpu", *words])
    assert end.value.code != 0
    assert said in capsys.readouterr().err


def test_a_record_that_was_cut_off_is_left_out(tmp_path):
    file = tmp_path / "records"
    Recorder(file).bar("llama", 1.0)
    with file.open("a") as lines:
        lines.write('{"kind": "bar", "ba')
    assert [record["bar"] for record in read(file)] == ["llama"]


def test_a_long_error_is_told_by_its_kind_and_its_end():
    text = told(RuntimeError("\n".join(f"line {number}" for number in range(20))))
    assert text.splitlines() == ["RuntimeError: line 0", *(f"line {number}" for number in range(15, 20))]
    assert told(ValueError("one\n\ntwo")) == "ValueError: one\ntwo"


def test_bars_are_the_right_way_round():
    records = [{"kind": "bar", "bar": name, "value": 1.0} for name in ("memory", "fp8-wide", "gpt2")]
    rows = dict(zip(bars.BARS, bars.rows(records, {}), strict=True))
    assert [rows[name][1] for name in ("memory", "fp8-wide", "gpt2", "llama")] == [True, False, True, None]


@pytest.mark.full
def test_everything_runs_on_a_cpu_in_tiny_sizes(tmp_path, nano_gpt):
    """What a person with a GPU runs, every line of it that a CPU can."""
    words = ["gpu", "--smoke", "--profile", "--nanogpt", str(nano_gpt), "--folder", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words], cwd=ROOT, check=False, capture_output=True, text=True
    )
    log = (tmp_path / "out/log.txt").read_text()
    assert done.returncode == 0, done.stdout + log[-4000:]
    found = json.loads((tmp_path / "out/result.json").read_text())
    assert [part["ended"] for part in found["parts"]] == [""] * len(command.PARTS)
    missing = {record["why"] for part in found["parts"] for record in part["records"] if "why" in record}
    assert all("not installed" in why or "GPU" in why for why in missing)
    sides = {record["cells"]["side"] for part in found["parts"] for record in part["records"]
             if record.get("table") == "training steps"}  # fmt: skip
    assert {"ours, bf16", "ours, FP8", "PyTorch, compiled whole", "nanoGPT, compiled"} <= sides
    profile = (tmp_path / "out/llama-0-96b-ours-bf16.txt").read_text()
    assert "first to last kernel" in profile
    assert (tmp_path / "out/llama-0-96b-ours-bf16.json.gz").stat().st_size > 1000


# --- its parts --------------------------------------------------------------------------------------------


@pytest.fixture
def nano_gpt(tmp_path):
    """A clone's ``model.py`` in small: what it is called with, and what it returns."""
    code = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        logits = self.lm_head(self.wte(idx))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
"""
    folder = tmp_path / "nanoGPT"
    folder.mkdir()
    (folder / "model.py").write_text(code)
    return folder


def test_nanogpt_is_given_our_sizes_and_its_own_padding(nano_gpt, monkeypatch):
    monkeypatch.syspath_prepend(str(nano_gpt))
    from importlib import import_module

    settings = Settings(smoke=True, records=Path("unused"), nanogpt=nano_gpt)
    peer = next(each for each in races.gpt2(settings).others if each.who == "nanogpt")
    recipe = attrs.evolve(peer, overrides=(*peer.overrides, "model.vocab=130")).load()
    found = NanoGPT(import_module("model"), recipe).model.config
    sys.modules.pop("model")
    assert (found.n_layer, found.n_head, found.n_embd, found.block_size) == (2, 2, 128, 16)
    assert (found.vocab_size, found.bias, found.dropout) == (192, True, 0.0)


@pytest.mark.full
def test_a_pytest_that_cannot_begin_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setenv("PYTEST_PLUGINS", "no_such_plugin")
    settings = Settings(smoke=True, records=tmp_path / "records")
    gpu_tests.run(settings, tmp_path)
    (record,) = (each for each in read(settings.records) if each["kind"] != "data")
    assert (record["kind"], record["name"]) == ("problem", "tests")
    assert "no_such_plugin" in record["text"]


def test_what_is_skipped_without_a_gpu_is_run_by_pytest_m_gpu():
    for path in only_gpu_tests.files(ROOT):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, (before, line) in enumerate(pairwise(lines), 2):
            if line.lstrip("@ ").startswith("pytest.mark.skipif(not torch.cuda.is_available()"):
                assert "pytest.mark.gpu" in before, f"{path}:{number}"


@pytest.mark.full
def test_tests_of_a_gpu_are_found_run_and_counted(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n")
    (folder / "test_plain.py").write_text("def test_plain():\n    raise AssertionError\n")
    (folder / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.gpu\ndef test_passes():\n    pass\n"
        "@pytest.mark.gpu\ndef test_fails():\n    assert 1 == 2\n"
        "@pytest.mark.skipif(True, reason='there is no GPU')\ndef test_waits():\n    pass\n"
        "def test_of_a_cpu():\n    raise AssertionError\n"
    )
    (folder / "test_broken.py").write_text("import no_such_module  # torch.cuda.is_available()\n")
    assert only_gpu_tests.files(tmp_path) == [folder / "test_broken.py", folder / "test_some.py"]
    settings = Settings(smoke=True, records=tmp_path / "records")
    gpu_tests.run(settings, tmp_path)
    records = [each for each in read(settings.records) if each["kind"] != "data"]
    broken, problem = (each for each in records if each["kind"] == "problem")
    assert broken["name"] == "tests/test_broken.py"
    assert "No module named 'no_such_module'" in broken["text"]
    assert problem["name"] == "tests/test_some.py::test_fails"
    assert "assert 1 == 2" in problem["text"]
    _, row = (each for each in records if each["kind"] == "row")
    assert row["cells"] == {"file": "tests/test_some.py", "passed": 1, "failed": 1, "skipped": 1}
    assert row["passed"] is False


def test_a_product_beyond_its_bound_fails(monkeypatch):
    """The torch backend's place is taken by products of which one element is wrong."""

    class Wrong(EmulatedFP8):
        def dgrad(self, d_y_MN, weight_NK):
            d_x = super().dgrad(d_y_MN, weight_NK)
            d_x[3, 5] *= 1.5
            return d_x

    kinds = {"emulated": EmulatedFP8, "torch": Wrong}
    backends = {name: SimpleNamespace(make=kind) for name, kind in kinds.items()}
    monkeypatch.setattr(fp8_kernels, "BACKENDS", backends)
    found = dict(agreement(attrs.evolve(TINY, compared=(96, 160, 72, 4)), "torch"))
    wrong = {"torch, one weight, dx", "torch, experts, dx"}
    assert {name for name, share in found.items() if share > 1} == wrong
    assert max(share for name, share in found.items() if name not in wrong) == 0
