"""``nanotrain inspect``: statistics against torch's own, outliers, what is not finite, and differences."""

import itertools
import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nanotrain_core.api import load_plugins
from nanotrain_core.cli import main
from nanotrain_core.testing import Case
from nanotrain_core.testing.case import HARNESS
from nanotrain_core.testing.probe import make_engine

NAME = "layers.0.attn.q.weight"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run folder with a checkpoint, and the weights in it."""
    folder = tmp_path_factory.mktemp("run")
    engine = make_engine(Case("checkpoint", use="simple"), {"run": {"steps": 2}}, folder=folder)
    engine.fit()
    return folder, {p.placement.name: p.parameter.detach().clone() for p in engine.run.placed}


def call(capsys, *words):
    code = main(["inspect", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def converted(trained, folder, change, *words):
    """Write the weights as `nanotrain convert` does, one of them changed."""
    assert main(["convert", str(trained[0]), str(folder), "--to", "nanotrain", *words]) == 0
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        metadata = stored.metadata()
    change(tensors)
    save_file(tensors, file, metadata)
    return folder


def test_statistics_are_torchs(trained, capsys):
    folder, weights = trained
    _, out, _ = call(capsys, folder, "--json")
    found = {each["name"]: each for each in json.loads(out)["parameters"]}
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        wide, each = tensor.double(), found[name]
        assert each["count"] == tensor.numel()
        assert tuple(each["shape"]) == tuple(tensor.shape)
        assert each["rms"] == pytest.approx(wide.square().mean().sqrt().item(), rel=1e-12)
        assert each["mean"] == pytest.approx(wide.mean().item(), rel=1e-9, abs=1e-15)
        assert each["max_abs"] == wide.abs().max().item()
        assert each["outliers"] == (wide.abs() > 6 * each["rms"]).double().mean().item()
        assert each["nonfinite"] == 0


def test_layers_and_parameters_are_tables(trained, capsys):
    folder, weights = trained
    _, out, _ = call(capsys, folder)
    count = sum(tensor.numel() for tensor in weights.values())
    assert f"{count:,} parameters in {len(weights)} tensors" in out
    rows = [line.split()[0] for line in out.splitlines()[2:] if line.strip()]
    assert "layers.0" in rows
    assert NAME not in rows
    _, out, _ = call(capsys, folder, "--all", "--only", "layers.0.*", "--top", "0")
    rows = {line.split()[0] for line in out.splitlines()[2:] if line.strip()}
    assert rows == {name for name in weights if name.startswith("layers.0.")}


def plant(tensors):
    tensors[NAME][1, 2] = 1000.0
    tensors["layers.1.ffn.up.weight"][0, :3] = float("nan")


def test_outliers_and_what_is_not_finite_stand_out(trained, tmp_path, capsys):
    other = converted(trained, tmp_path / "other", plant)
    capsys.readouterr()
    _, out, _ = call(capsys, other, "--all")
    row = next(line for line in out.splitlines() if line.strip().startswith("layers.1.ffn.up.weight"))
    assert row.split()[-1] == "3"
    lines = out.splitlines()
    first = lines[next(n for n, line in enumerate(lines) if line.startswith("largest outliers")) + 1]
    assert NAME in first


def test_two_of_the_same_values_do_not_differ_and_a_changed_number_is_found(trained, tmp_path, capsys):
    folder, weights = trained
    assert main(["convert", str(folder), str(tmp_path / "theirs"), "--to", "huggingface"]) == 0
    capsys.readouterr()
    _, out, _ = call(capsys, folder, tmp_path / "theirs")
    assert f"{len(weights)} of {len(weights)} tensors have the same values" in out

    def change(tensors):
        tensors[NAME][1, 2] += 0.5

    other = converted(trained, tmp_path / "other", change)
    capsys.readouterr()
    _, out, _ = call(capsys, folder, other, "--json")
    found = {each["name"]: each for each in json.loads(out)["parameters"]}
    assert {name for name, each in found.items() if each["differing"]} == {NAME}
    mine = weights[NAME].double()
    theirs = mine.clone()
    theirs[1, 2] = (weights[NAME][1, 2] + 0.5).double()
    changed = found[NAME]
    assert changed["max_abs"] == (theirs - mine).abs().max().item()
    assert changed["relative"] == pytest.approx(((theirs - mine).norm() / mine.norm()).item(), rel=1e-12)
    cosine = torch.nn.functional.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0).item()
    assert changed["cosine"] == pytest.approx(cosine, rel=1e-9)


def test_damage_is_told_beside_what_it_made_of_the_numbers(trained, tmp_path, capsys):
    assert call(capsys, trained[0])[0] == 0
    run = shutil.copytree(trained[0], tmp_path / "run")
    (file,) = (run / "checkpoints").glob("step-00000002.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x40  # an exponent's
    file.write_bytes(content)
    for words in ([], ["--json"], [trained[0]]):
        code, out, err = call(capsys, run, *words)
        assert (code, f"{file} is damaged" in err, bool(out)) == (2, True, True)
    code, _, err = call(capsys, run, "--only", NAME)  # reads little of a large checkpoint
    assert code == 0
    assert f"{run} was not compared with its hashes, as --only is given: `nanotrain ckpt verify {run}`" in err


def test_large_tensors_are_read_in_parts(trained, capsys, monkeypatch):
    def numbers():
        found = json.loads(call(capsys, trained[0], "--json")[1])["parameters"]
        return [each[key] for each in found for key in ("rms", "mean", "max_abs", "outliers")]

    whole = numbers()
    monkeypatch.setattr("nanotrain_inspect.statistics.AT_ONCE", 100)
    assert numbers() == pytest.approx(whole, rel=1e-9, abs=1e-15)


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    """Return a run folder of a model with experts, and its weights."""
    folder = tmp_path_factory.mktemp("moe")
    engine = make_engine(
        Case("checkpoint", use="simple"), {"run": {"steps": 2}, "model": {"use": "routed"}}, folder=folder
    )
    engine.fit()
    return folder, {p.placement.name: p.parameter.detach().clone() for p in engine.run.placed}


#: The model with experts that every case of the harness knows.
PLUGIN = ("--plugin", HARNESS)


def lines_after(out, head):
    lines = out.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(head)) + 1
    return [line.strip() for line in itertools.takewhile(str.strip, lines[first:])]


def test_experts_that_are_stacked_are_compared_one_by_one(routed, tmp_path, capsys):
    folder, weights = routed
    layers = {}
    for name, tensor in weights.items():
        if ".experts." in name:
            layers.setdefault(name.rpartition(".")[0], []).append(tensor.double().square().sum((1, 2)))
    expected = {name: sum(parts).sqrt() for name, parts in layers.items()}
    assert expected
    _, out, _ = call(capsys, folder, *PLUGIN)
    told = lines_after(out, "experts: norm of the smallest")
    assert [line.partition(":")[0] for line in told] == [*expected]
    for line, norms in zip(told, expected.values(), strict=True):
        least, most = norms.argmin(), norms.argmax()
        ends = f"{norms[least]:.4g} (expert {least}) to {norms[most]:.4g} (expert {most})"
        assert line.endswith(f": {len(norms)} experts, {ends}")

    def starve(tensors):
        for name in tensors:
            if name.startswith("layers.1.experts."):
                tensors[name][3] *= 0.01

    other = converted(routed, tmp_path / "other", starve, *PLUGIN)
    capsys.readouterr()
    _, out, _ = call(capsys, other, *PLUGIN)
    assert " (expert 3) to " in lines_after(out, "experts: norm of the smallest")[-1]
    assert "share of tokens" not in out  # there are no metrics beside weights alone


def test_the_experts_of_a_run_are_told_with_the_tokens_that_they_got(routed, capsys):
    folder, _ = routed
    rows = [{"event": "start", "first_step": 0, "time": 1.0, "attempt": 1}]
    for step, counts in ((1, [1.0] * 8), (2, [10.0, 20.0, 0.0, 40.0, 5.0, 5.0, 10.0, 10.0])):
        load = {"edges": [*range(9)], "counts": counts, "below": 0.0, "above": 0.0, "nan": 0.0}
        loads = {f"moe/load/layers.{layer}.router": load for layer in (0, 10, 2)}
        rows.append({"event": "metrics", "step": step, "values": {}, "histograms": loads})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, out, _ = call(capsys, folder, *PLUGIN)
    said = "8 experts at step 2, 0.00% (expert 2) to 40.00% (expert 3); 12.50% each is even; 1 got none"
    assert lines_after(out, "experts: share of tokens") == [
        f"layers.{layer}.router: {said}" for layer in (0, 2, 10)
    ]
    table = json.loads(call(capsys, folder, "--json", *PLUGIN)[1])["expert_loads"]
    assert table["layers.10.router"] == {"step": 2, "shares": [0.1, 0.2, 0.0, 0.4, 0.05, 0.05, 0.1, 0.1]}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nosuch"], "nosuch: there is no such file, folder or recipe; recipes are "),
        (["llama_8c"], "llama_8c: there is no such file, folder or recipe (did you mean 'llama_8b'?)"),
        (["laptp"], "laptp: there is no such file, folder or recipe (did you mean 'laptop'?)"),
        (["rum/first"], "(did you mean 'runs/first'?)"),
        (["converte"], "(did you mean 'converted'?)"),
        (["RUN", "--only", "layer.0.attn.q.weight"], "(did you mean 'layers.0.attn.q.weight'?)"),
    ],
)
def test_mistakes_are_told_without_a_traceback(trained, capsys, words, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "converted").mkdir()
    (tmp_path / "ap").touch()
    (tmp_path / "runs/first").mkdir(parents=True)
    (tmp_path / "runs/first/metrics.jsonl").touch()
    code, _, err = call(capsys, *(str(trained[0]) if word == "RUN" else word for word in words))
    assert code != 0
    assert text in err
    assert "Traceback" not in err


def test_a_number_of_outliers_below_0_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["inspect", "run", "--top", "-1"])
    assert "expected 0 or a whole number above it, got '-1'" in capsys.readouterr().err


def test_a_recipe_without_the_plugin_that_reads_it(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text("[run]\n")
    installed = "plan" in {plugin.name for plugin in load_plugins().plugins}
    code, _, err = call(capsys, path, *["--no-plugin", "plan"] * installed)
    assert code == 2
    assert (
        "mine.toml is a recipe; to see what its model is: pip install nanotrain-plan (in a checkout: " in err
    )
