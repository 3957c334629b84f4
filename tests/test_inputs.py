"""What a run reads is looked at before its ranks start: data, tokenizer, weights. Never with torch."""

import re
import sys

import pytest
from recipe_files import SMALL, write
from test_cli_reading import call
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from nanotrain_core.builtin.configs import SyntheticConfig, TextConfig, survey_synthetic
from nanotrain_core.data.synthetic import Synthetic
from nanotrain_core.data.text import Text
from nanotrain_core.data.text_survey import survey
from nanotrain_core.errors import Exit
from nanotrain_core.launch import launcher
from nanotrain_core.testing import Case, failures, trials

SYNTHETIC = {"data.use": '"synthetic"', "data.vocab": "256"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A recipe, 1,000 bytes of text, a tokenizer of 300 words, a file that is none, and weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("w7 " * 300)
    (tmp_path / "text" / "b.txt").write_text("w7 " * 33 + "\n")
    (tmp_path / "text" / "empty.txt").write_text("")
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0} | {f"w{i}": i for i in range(1, 300)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "weights").mkdir()
    return tmp_path


def told(capsys, folder, values, *words):
    """Return what ``nanotrain check`` says of the recipe with those values: no paths of the test's folder."""
    changes = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    code, out, err = call(capsys, "check", "recipe.toml", *changes, *words)
    assert (code == Exit.DONE) == (out != "")
    assert code in (Exit.DONE, Exit.USER)
    return [line.removeprefix("nanotrain: ") for line in err.replace(f"{folder}/", "").splitlines()]


PATHS = {"data.paths": '["text"]'}
WORDS = {**PATHS, "data.tokenizer": '"words.json"', "model.vocab": "300"}

REFUSED = {
    "synthetic vocabulary": (
        {"data.use": '"synthetic"', "data.vocab": "300"},
        "recipe.toml:14: model.vocab: data 'synthetic' has 300 tokens but the model's vocabulary is 256; "
        "expected at least 300",
    ),
    "bytes": (
        {"model.vocab": "255"},
        "--set #1: model.vocab: data 'text' has 256 tokens but the model's vocabulary is 255; "
        "expected at least 256",
    ),
    "words": (
        {**WORDS, "model.vocab": "299"},
        "--set #3: model.vocab: data 'text' has 300 tokens but the model's vocabulary is 299; "
        "expected at least 300",
    ),
    "missing path": (
        {"data.paths": '["text", "tex"]'},
        "--set #1: data.paths.1: data path tex does not exist: no 'tex' in {folder} (did you mean 'text'?)",
    ),
    "other suffixes": (
        {**PATHS, "data.suffixes": '[".py"]'},
        "--set #1: data.paths.0: data folder text has no file with suffix .py: it has .txt (3); "
        "set data.suffixes",
    ),
    "missing tokenizer": (
        {**PATHS, "data.tokenizer": '"word.json"'},
        "--set #2: data.tokenizer: tokenizer word.json does not exist: no 'word.json' in {folder} "
        "(did you mean 'words.json'?)",
    ),
    "a folder as tokenizer": (
        {**PATHS, "data.tokenizer": '"text"'},
        "--set #2: data.tokenizer: tokenizer text is a folder; expected a file, such as text/tokenizer.json",
    ),
    "batch of more than there are": (
        {**SYNTHETIC, "data.sequences": "7"},
        "recipe.toml:5: batch.sequences: one batch takes 8 sequences of 16 tokens, but the training data "
        "has 7: lower batch.sequences or batch.length, or add data",
    ),
    "batch of more than the text has": (
        {**PATHS, "batch.length": "200"},
        "recipe.toml:5: batch.sequences: one batch takes 8 sequences of 200 tokens, but the training data "
        "has 4: lower batch.sequences or batch.length, or add data",
    ),
    "batch of more than the words make": (
        {**WORDS, "batch.length": "100"},
        "recipe.toml:5: batch.sequences: one batch takes 8 sequences of 100 tokens, but the training data "
        "has 2: lower batch.sequences or batch.length, or add data",
    ),
    "less than one sequence": (
        {**PATHS, "batch.length": "1002"},
        "--set #2: batch.length: a sequence takes 1003 tokens, but the text has 1002: "
        "add text or lower the length",
    ),
    "nothing to evaluate": (
        {**SYNTHETIC, "data.validation_sequences": "0", "evaluation.every": "10"},
        "--set #4: evaluation.every: every 10 steps the loss on data that is held out is wanted, but data "
        "'synthetic' holds none out; hold some out, or set evaluation.every = 0",
    ),
    "missing weights": (
        {"run.weights": '"weigths"'},
        "--set #1: run.weights: weigths: there is no such file or folder (did you mean 'weights'?)",
    ),
    "a folder without weights": (
        {"run.weights": '"weights"'},
        "--set #1: run.weights: weights holds no weights that can be read: expected a folder with "
        "config.json (Hugging Face) or model.toml (`nanotrain convert`), a checkpoint, or the folder of "
        "a run that saved one",
    ),
}


@pytest.mark.parametrize(("values", "line"), REFUSED.values(), ids=REFUSED)
def test_check_refuses_what_ranks_would(capsys, folder, values, line):
    assert told(capsys, folder, values) == [line.format(folder=folder)]


def test_check_tells_every_problem_at_once(capsys, folder):
    values = {
        "data.paths": '["nowhere", "text", "none"]',
        "data.tokenizer": '"no.json"',
        "run.weights": '"no"',
    }
    keys = [line.split(": ")[1] for line in told(capsys, folder, values)]
    assert keys == ["data.paths.0", "data.paths.2", "data.tokenizer", "run.weights"]


@pytest.mark.parametrize(
    "values",
    [
        {**PATHS, "batch.length": "110", "evaluation.every": "1"},
        {**WORDS, "batch.length": "33"},
        {**SYNTHETIC, "data.sequences": "8", "data.validation_sequences": "0"},
        {**PATHS, "data.validation_fraction": "0.0", "evaluation.every": "1", "evaluation.sequences": "0"},
    ],
    ids=["as many as a batch", "words", "synthetic", "no evaluation"],
)
def test_check_passes_what_is_just_enough(capsys, folder, values):
    assert told(capsys, folder, values) == []


def test_a_tokenizer_without_its_package_is_refused(capsys, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (line,) = told(capsys, folder, WORDS)
    assert line.startswith(
        "--set #2: data.tokenizer: the tokenizer words.json needs the package tokenizers: pip"
    )


def test_what_is_no_tokenizer_is_refused(capsys, folder):
    (line,) = told(capsys, folder, {**PATHS, "data.tokenizer": '"other.json"'})
    assert line.startswith("--set #2: data.tokenizer: other.json is not a tokenizer.json of Hugging Face: ")


# --- run --------------------------------------------------------------------------------------


def run(capsys, monkeypatch, *words):
    """Return the exit code of ``nanotrain run``, its words on stderr, and whether ranks were started."""
    started = []
    monkeypatch.setattr(launcher, "launch", lambda *arguments: started.append(arguments) or 0)
    monkeypatch.setattr("nanotrain_core.cli.run.end_on_sigterm", lambda *_, **__: None)
    code, _, err = call(capsys, "run", "recipe.toml", *words)
    return code, err, bool(started)


def test_run_refuses_with_the_words_of_check_and_starts_no_rank(capsys, folder, monkeypatch):
    code, err, started = run(capsys, monkeypatch, "--set", "model.vocab=255")
    assert (code, started) == (Exit.USER, False)
    assert err.startswith("nanotrain: --set #1: model.vocab: data 'text' has 256 tokens but")
    assert run(capsys, monkeypatch) == (Exit.DONE, "", True)


def test_a_resumed_run_needs_no_weights_but_those_of_its_checkpoint(capsys, folder, monkeypatch):
    gone = ("--set", 'run.weights="gone"')
    code, err, started = run(capsys, monkeypatch, *gone)
    assert (code, started) == (Exit.USER, False)
    assert "run.weights" in err
    assert run(capsys, monkeypatch, *gone, "--resume") == (Exit.DONE, "", True)


# --- surveys ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("tokenizer", ["bytes", "words.json"])
@pytest.mark.parametrize("paths", [("text",), ("text/b.txt", "text", "text/empty.txt")], ids=["one", "three"])
def test_a_survey_of_text_is_what_is_opened(folder, paths, tokenizer, fraction):
    config = TextConfig(paths=paths, tokenizer=tokenizer, validation_fraction=fraction)
    found, data = survey(config, 9), Text(config)
    data.open(length=9, seed=0)
    assert (found.vocab, found.train, found.validation) == (data.vocab_size, data.train, data.validation)


def test_a_survey_of_synthetic_data_is_what_is_opened():
    config = SyntheticConfig(vocab=9, sequences=5, validation_sequences=3)
    found, data = survey_synthetic(config, 9), Synthetic(config)
    data.open(length=9, seed=0)
    assert (found.vocab, found.train, found.validation) == (data.vocab_size, data.train, data.validation)


def test_a_survey_counts_no_tokens_of_much_text(folder, monkeypatch):
    monkeypatch.setattr("nanotrain_core.data.text_survey.SMALL", 999)
    found = survey(TextConfig(paths=("text",), tokenizer="words.json"), 9)
    assert (found.vocab, found.train, found.validation) == (300, None, None)


PLUGIN = """
import attrs
from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.errors import DataError, Problem
from nanotrain_core.data.survey import Survey

@attrs.define(frozen=True)
class Config:
    word: str = "good"

@hookimpl
def nanotrain_register_data(register):
    survey = f"{__name__}:survey"
    register(Component(name="own", config=Config, factory="json:Thing", survey=survey))

def survey(config, length, longest=0):
    if length > 16:
        return Survey(problems=[Problem("batch.length", f"nothing has {length} tokens")])
    if config.word == "bad":
        raise DataError("the store does not answer")
    if config.word == "odd":
        return {"vocab": 3}
    if config.word == "wrong":
        return Survey(vocab=-1)
    problems = [Problem("data.word", "expected good")] if config.word == "poor" else []
    return Survey(vocab=257, train=length, problems=problems)
"""


@pytest.mark.parametrize(
    ("word", "lines"),
    [
        (
            "good",
            [
                "recipe.toml:14: model.vocab: data 'own' has 257 tokens but the model's vocabulary is 256; "
                "expected at least 257"
            ],
        ),
        ("bad", ["--set #2: data: the store does not answer"]),
        (
            "poor",
            ["--set #2: data.word: expected good", "recipe.toml:14: model.vocab: data 'own' has 257 tok"],
        ),
        (
            "odd",
            [
                "data 'own' of plugin 'own_data' (FILE): its survey returned {'vocab': 3}; "
                "expected a nanotrain_core.api.Survey"
            ],
        ),
        (
            "wrong",
            ["data 'own' of plugin 'own_data' (FILE): its survey raised ValueError: 'vocab' must be >= 0"],
        ),
    ],
)
def test_a_plugins_survey_is_heard(capsys, folder, word, lines):
    (folder / "own_data.py").write_text(PLUGIN)
    values = {"data.use": '"own"', "data.word": f'"{word}"'}
    found = told(capsys, folder, values, "--plugin", "own_data.py")
    found = [re.sub(r"\(own_data.py \S+\)", "(FILE)", line) for line in found]
    assert len(found) == len(lines)
    assert all(got.startswith(want) for got, want in zip(found, lines, strict=True)), found


def test_a_survey_is_heard_of_each_length_once_where_a_phase_sets_it(capsys, folder):
    (folder / "own_data.py").write_text(PLUGIN.replace("survey=survey", "survey=survey, provides=PROVIDES"))
    with (folder / "own_data.py").open("a") as file:
        file.write('\nPROVIDES = frozenset({"changes_length"})\n')
    with (folder / "recipe.toml").open("a") as file:
        for length, until in ((32, 4096), (16, 8192), (64, 16384), (32, 32768)):
            file.write(f"[[phase]]\nuntil_tokens = {until}\nbatch = {{ length = {length} }}\n")
    values = {"data.use": '"own"', "model.vocab": "257", "run.steps": "128"}
    found = told(capsys, folder, values, "--plugin", "own_data.py")
    expected = [(0, 32), (2, 64), (3, 32)]
    wanted = [f"phase.{number}.batch.length: nothing has {length} tokens" for number, length in expected]
    assert [line.partition(": ")[2] for line in found] == wanted


def test_the_places_of_the_small_recipe_are_what_these_tests_say():
    lines = SMALL.splitlines()
    assert (lines[4], lines[13]) == ("sequences = 8", "vocab = 256")


TELLS = """
from nanotrain_core import hookimpl
from nanotrain_core.builtin.configs import SyntheticConfig, survey_synthetic
from nanotrain_core.component import Component
from nanotrain_core.data.survey import Survey

@hookimpl
def nanotrain_register_data(register):
    factory, survey = "nanotrain_core.data.synthetic:Synthetic", f"{__name__}:survey"
    component = Component(name="tells", config=SyntheticConfig, factory=factory, summary="x", survey=survey)
    register(component)

def survey(config, length):
    SAYS
"""


@pytest.mark.full_cases("vocabulary", "held out", "torch")
@pytest.mark.parametrize(
    ("says", "text"),
    [
        ("return survey_synthetic(config, length)", ""),
        ("return Survey()", ""),
        ("return Survey(vocab=config.vocab + 1)", "it says 65 tokens, not 64"),
        ("return Survey(validation=9)", "it says that 9 are held out, not 10"),
        ("return Survey(train=7)", "it says that there are 7 to train on, but a batch of 8 can be taken"),
        ("import torch; return Survey()", "its survey imports torch"),
    ],
    ids=["true", "nothing", "vocabulary", "held out", "to train on", "torch"],
)
def test_the_harness_holds_a_survey_against_what_is_opened(tmp_path, says, text):
    plugin = tmp_path / "tells.py"
    plugin.write_text(TELLS.replace("SAYS", says))
    config = {"vocab": 64, "sequences": 64, "validation_sequences": 10}
    case = Case("data", use="tells", config=config, plugins=[plugin])
    (trial,) = (trial for trial in trials(case) if trial.label == "survey_is_true")
    found = [str(error).partition("\n")[0] for error in failures([trial]).values()]
    assert found == ([text] if text else [])
