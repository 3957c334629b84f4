"""``nanotrain schedule`` draws what the schedule says, and the documentation shows what it draws."""

import re
from pathlib import Path

import pytest
from recipe_files import SMALL, write

from nanotrain_core.cli import main
from nanotrain_core.cli.drawing import draw
from nanotrain_core.errors import Exit
from nanotrain_core.pipeline.accumulate import Accumulate
from nanotrain_core.pipeline.actions import Action
from nanotrain_core.pipeline.simulator import simulate

DOC = (Path(__file__).parents[1] / "docs/schedules.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```\n\$ nanotrain (schedule .*)\n((?s:.*?))```", DOC, re.MULTILINE)


def call(capsys, *words):
    """Run a command and return (exit code, stdout, stderr)."""
    code = main(["schedule", *map(str, words)])
    return code, *capsys.readouterr()


def bars(out):
    """Return the cells of each rank's row."""
    return [line.split()[3:] for line in out.splitlines() if re.match(r" *\d+ +\d+\.\d% ", line)]


def test_the_documentation_shows_every_schedule():
    assert {words.split()[1] for words, _ in EXAMPLES} == {
        "1f1b",
        "gpipe",
        "interleaved_1f1b",
        "zb_h1",
        "dualpipe_v",
    }


@pytest.mark.parametrize(("words", "shown"), EXAMPLES, ids=[words for words, _ in EXAMPLES])
def test_the_documentation_shows_what_the_command_prints(capsys, words, shown):
    assert main(words.split()) == Exit.DONE
    printed = capsys.readouterr().out
    assert printed == shown or printed.startswith(f"{shown}\nF forward")


def test_a_row_for_each_rank_and_a_cell_for_each_unit(capsys):
    code, out, err = call(capsys, "1f1b", "--pp", 2, "--microbatches", 2)
    assert (code, err) == (0, "")
    assert out.startswith("1f1b: pp 2, 2 microbatches, 9 units of time, bubble 33.3%\n")
    assert bars(out) == [
        ["F0", "F1", ".", ".", "B0---", ".", "B1---"],
        [".", "F0", "B0---", "F1", "B1---", ".", "."],
    ]


def test_virtual_stages_have_letters(capsys):
    _, out, _ = call(capsys, "interleaved_1f1b", "--pp", 1, "--microbatches", 1, "--v", 3)
    assert bars(out) == [["F0a", "F0b", "F0c", "B0c----", "B0b----", "B0a----"]]
    assert "a letter which of its rank's stages" in out


def test_a_narrow_terminal_folds_the_rows():
    lists = [[Action(kind, 0, m) for m in range(6) for kind in ("F", "B", "W")]]
    (row,) = bars("\n".join(draw(simulate(lists))))
    folded = bars("\n".join(draw(simulate(lists), width=34)))
    assert [len(piece) for piece in folded] == [5, 5, 5, 3]
    assert [cell for piece in folded for cell in piece] == row


def test_layers_show_how_they_are_split(capsys):
    _, out, _ = call(capsys, "1f1b", "--pp", 3, "--layers", 6, "--set", "layers=[5, 1, 0]")
    assert out.splitlines()[-3:] == [
        "stage 0 on rank 0: embedding, layers 0 to 4",
        "stage 1 on rank 1: layer 5",
        "stage 2 on rank 2: no layers, head",
    ]


def test_listed_layers_are_shown_without_their_number(capsys):
    _, counted, _ = call(capsys, "1f1b", "--pp", 3, "--layers", 6, "--set", "layers=[5, 1, 0]")
    assert call(capsys, "1f1b", "--pp", 3, "--set", "layers=[5, 1, 0]") == (0, counted, "")
    code, _, err = call(capsys, "1f1b", "--pp", 2, "--set", "layers=[5, 1, 0]")
    assert (code, err.count("\n")) == (Exit.USER, 1)
    assert "names 3 stages; expected 2" in err


def test_a_recipe_draws_its_own_schedule(capsys, tmp_path):
    path = write(tmp_path, SMALL + '[topology]\npp = 2\n[schedule]\nuse = "zb_h1"\n')
    code, out, err = call(capsys, path, "--set", "run.ranks=2")
    assert (code, err) == (0, "")
    assert out.startswith(f"{path}: zb_h1: pp 2, 4 microbatches, 13 units of time, bubble 7.7%\n")
    assert out.endswith("stage 0 on rank 0: embedding, layer 0\nstage 1 on rank 1: layer 1, head\n")


def test_a_recipe_has_the_stages_of_its_run(capsys, tmp_path):
    path = write(tmp_path, SMALL + '[topology]\npp = 2\n[schedule]\nuse = "1f1b"\n')
    large = ["--set", "model.layers=4", "--set", "model.vocab=1024"]  # the head costs 2.6 of these layers
    _, out, _ = call(capsys, path, "--set", "run.ranks=2", *large)
    assert out.endswith("stage 0 on rank 0: embedding, layers 0 to 2\nstage 1 on rank 1: layer 3, head\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["1f2b"], "no schedule named '1f2b' (did you mean '1f1b'?)"),
        (["accumulate", "--pp", "2"], "schedule 'accumulate' has no pipeline: expected --pp 1, got 2"),
        (["1f1b", "--layers", "3"], "1f1b: 3 layers cannot fill 4 stages (pp 4): at most pp = 3"),
        (["1f1b", "--v", "2"], "schedule.v: unknown key 'v'"),
        (["interleaved_1f1b", "--set", "v=0"], "schedule.v: expected an integer from 1 to 10,000, got 0"),
        (["laptop", "--pp", "2"], "--pp goes with a schedule's name; of a recipe --set topology.pp=N"),
        (["nowhere.toml"], "nowhere.toml: no such file; `nanotrain recipes`"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_without_a_traceback(capsys, words, text):
    code, out, err = call(capsys, *words)
    assert (code, out) == (Exit.USER, "")
    assert err.startswith("nanotrain: ")
    assert text in err


def test_a_pass_that_is_lost_is_told_and_not_drawn_around(capsys):
    twins = str(Path(__file__).with_name("broken_twins.py"))
    code, out, err = call(capsys, "drops_backward", "--plugin", twins, "--microbatches", 3)
    assert (code, out) == (Exit.USER, "")
    assert "drops_backward: rank 0 lacks B0.2" in err


def test_a_schedule_that_fails_is_told_with_its_line(capsys, monkeypatch):
    """It was a traceback, where `nanotrain check` of a recipe names the schedule."""
    monkeypatch.setattr(Accumulate, "actions", lambda self, pp, microbatches: 1 // 0)
    code, out, err = call(capsys, "accumulate")
    assert (code, out) == (Exit.USER, "")
    assert "accumulate raised ZeroDivisionError" in err
    assert "test_cli_schedule.py" in err
