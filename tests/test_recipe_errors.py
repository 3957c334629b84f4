import pytest
from recipe_files import SMALL, write

from nanotrain_core.cli import main
from nanotrain_core.errors import Exit, RecipeError
from nanotrain_core.recipe import load_recipe
from nanotrain_core.recipe.source import file_sources


def problems(tmp_path, text=SMALL, **arguments) -> list[str]:
    """Return the problems of a recipe, each without the folder's name."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, text), **arguments)
    return [line.replace(f"{tmp_path}/", "") for line in caught.value.lines]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "steps = 3",
            "step = 3",
            "recipe.toml:2: run.step: unknown key 'step' (did you mean 'steps'?); valid: name, ",
        ),
        ("steps = 3", "", "recipe.toml:1: run.steps: missing; expected an integer"),
        ("steps = 3", "steps = 3.0", "recipe.toml:2: run.steps: expected an integer, got the float 3.0"),
        ("steps = 3", "steps = true", "recipe.toml:2: run.steps: expected an integer, got the boolean true"),
        ("steps = 3", 'steps = "3"', "recipe.toml:2: run.steps: expected an integer, got the string '3'"),
        (
            "steps = 3",
            "steps = 0",
            "recipe.toml:2: run.steps: expected an integer from 1 to 2,147,483,647, got 0",
        ),
        (
            "heads = 4",
            "bias = 1\nheads = 4",
            "recipe.toml:13: model.bias: expected true or false, got the integer 1",
        ),
        (
            "heads = 4",
            'norm = "rmsnrm"\nheads = 4',
            "recipe.toml:13: model.norm: expected one of 'rmsnorm', 'layernorm', got the string 'rmsnrm' "
            "(did you mean 'rmsnorm'?)",
        ),
        ("[batch]", "[batches]", "recipe.toml:4: batches: unknown section 'batches' (did you mean 'batch'?)"),
        ("[model]", "[[model]]", "recipe.toml:9: model: expected a table: write [model], got the array"),
        (
            '"transformer"',
            '"transfromer"',
            "recipe.toml:10: model.use: no model named 'transfromer' (did you mean 'transformer'?)",
        ),
        ('use = "transformer"', "", "recipe.toml:9: model.use: missing; installed: "),
        (
            "[run]",
            "[parallel]\n[run]",
            "recipe.toml:1: parallel: expected an array of tables: write [[parallel]]",
        ),
        (
            "vocab = 256",
            "vocab = 256\n[optimizer]\nbetas = [0.9, 'x']",
            "recipe.toml:16: optimizer.betas.1: expected a number, got the string 'x'",
        ),
        (
            "vocab = 256",
            "vocab = 256\n[optimizer]\nbetas = [0.9]",
            "recipe.toml:16: optimizer.betas: expected an array of 2 items, got 1",
        ),
        (
            "vocab = 256",
            "vocab = 256\n[optimizer]\nlr_schedule = {use = 'cosine', warmup = 3}",
            "recipe.toml:16: optimizer.lr_schedule.warmup: unknown key 'warmup' (did you mean 'warmup_steps'",
        ),
        (
            "vocab = 256",
            "vocab = 256\n[optimizer]\nlr_schedule = 'cosine'",
            "recipe.toml:16: optimizer.lr_schedule: expected a table, got the string 'cosine': "
            'write { use = "cosine" }',
        ),
        (
            "[run]",
            'precision = "bf16"\n[run]',
            'recipe.toml:1: precision: expected a table: write [precision] with use = "bf16", got the string',
        ),
        (
            "steps = 3",
            "steps = 3\nlr = 1e-3",
            "recipe.toml:3: run.lr: unknown key 'lr' (did you mean 'optimizer.lr'?); valid: ",
        ),
        (
            "vocab = 256",
            "vocab = 256\n[checkpoint]\nuse = 'simple'\nevery_minutes = 5",
            "recipe.toml:17: checkpoint.every_minutes: unknown key 'every_minutes': it is a key of "
            "checkpoint 'sharded_v2'; valid: every, keep",
        ),
        (
            "steps = 3",
            "steps = 3\nextends = 'laptop'",
            "recipe.toml:3: run.extends: unknown key 'extends': extends belongs above all tables of the",
        ),
        (
            "vocab = 256",
            "vocab = 256\nprecision = {use = 'bf16'}",
            "recipe.toml:15: model.precision: unknown key 'precision': precision belongs above all tables",
        ),
        (
            "heads = 4",
            "n_head = 4",
            "recipe.toml:13: model.n_head: unknown key 'n_head': it is heads; valid: ",
        ),
        (
            "vocab = 256",
            "vocab = 256\n[optimizer]\nuse = 'zero12'\nlearning_rate = 1e-3",
            "recipe.toml:17: optimizer.learning_rate: unknown key 'learning_rate': it is lr; valid: ",
        ),
        (
            "[run]",
            'requires = ["nanotrain-none>=1"]\n[run]',
            "recipe.toml:1: requires.0: nanotrain-none is not installed",
        ),
        (
            "[run]",
            'requires = ["nanotrain-core>=9"]\n[run]',
            "recipe.toml:1: requires.0: needs nanotrain-core>=9, but 0.",
        ),
        (
            "[run]",
            'requires = "nanotrain-core"\n[run]',
            "recipe.toml:1: requires: expected an array of strings",
        ),
        ("[run]", "versions = 3\n[run]", "recipe.toml:1: versions: expected a table"),
    ],
)
def test_mistake_is_told_with_file_line_key_and_remedy(tmp_path, old, new, expected):
    assert any(line.startswith(expected) for line in problems(tmp_path, SMALL.replace(old, new, 1)))


def test_all_problems_are_told_at_once(tmp_path):
    text = SMALL.replace("steps", "step").replace("width = 32", "width = 'x'") + '[optimizer]\nuse = "adam"\n'
    found = problems(tmp_path, text)
    assert len(found) == 4
    assert {line.split(": ")[1] for line in found} == {
        "run.step",
        "run.steps",
        "model.width",
        "optimizer.use",
    }


def test_several_values_out_of_range_are_all_told(tmp_path):
    found = problems(tmp_path, SMALL.replace("layers = 2", "layers = 0").replace("width = 32", "width = -1"))
    assert [line.split(": ")[1] for line in found] == ["model.layers", "model.width"]


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("parallel.0", '[[parallel]]\nuse = "ddp"\n'),
        ("parallel.0", '[[parallel]]\nuse = "tp"\n'),
        ("optimizer", '[optimizer]\nuse = "zero12"\nlr = 0.1\n'),
    ],
    ids=["ddp", "tp", "zero12"],
)
def test_a_key_that_moved_to_the_kernels_is_told_where(tmp_path, key, table):
    (line,) = problems(tmp_path, SMALL + table + "shared_memory = false\n")
    said = "unknown key 'shared_memory': it is kernels.shared_memory, of [kernels] use = \"cpu\", for the"
    assert f": {key}.shared_memory: {said} whole run; valid: " in line


def test_mistake_in_the_extended_file_names_that_file(tmp_path):
    write(tmp_path, SMALL.replace("width = 32", 'width = "wide"'), "base.toml")
    (line,) = problems(tmp_path, 'extends = "base.toml"\n[run]\nsteps = 5\n')
    assert line.startswith("base.toml:12: model.width: expected an integer")


def test_mistake_in_an_option_names_the_option(tmp_path):
    (line,) = problems(tmp_path, overrides=["run.seed=1", "run.steps=many"])
    assert line == "--set #2: run.steps: expected an integer, got the string 'many'"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run.steps", "--set #1: expected KEY=VALUE"),
        ("steps=5", "--set #1: steps: unknown section 'steps' (did you mean 'run.steps'?); valid: "),
        ("lr=5", "--set #1: lr: unknown section 'lr' (did you mean 'optimizer.lr'?); valid: "),
        ("every=5", "--set #1: every: unknown section 'every' (did you mean 'evaluation.every'?); valid: "),
        (
            "topology.dp=2",
            "--set #1: topology.dp: unknown key 'dp': dp is what pp, cp and tp leave of run.ranks; ",
        ),
        ("run..steps=3", "--set #1: 'run..steps=3': "),
        ("extends=base.toml", "--set #1: extends: only a file can extend another"),
        ("monitor.5.use=jsonl", "--set #1: monitor.5: there is no item 5; the next free number is 2"),
    ],
)
def test_malformed_option_is_refused(tmp_path, line, expected):
    (found,) = problems(tmp_path, overrides=[line])
    assert found.startswith(expected)


def test_toml_syntax_error_has_its_line(tmp_path):
    (line,) = problems(tmp_path, SMALL.replace("length = 16", "length = = 16"))
    assert line.startswith("recipe.toml:7: Invalid value")


def test_table_that_is_there_twice_is_told_as_it_is_written(tmp_path):
    (line,) = problems(tmp_path, SMALL + "[model]\n")
    assert line.startswith("recipe.toml:15: Cannot declare [model] twice")


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(SMALL, encoding="utf-8-sig")
    load_recipe(path)


def test_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="not UTF-8 text"):
        load_recipe(path)


def test_missing_parent_suggests_a_neighbor(tmp_path):
    write(tmp_path, SMALL, "base.toml")
    (line,) = problems(tmp_path, '\nextends = "bass.toml"\n')
    assert line.startswith("recipe.toml:2: extends: no file")
    assert line.endswith("(did you mean 'base.toml'?)")


def test_missing_parent_suggests_a_shipped_part_of_that_name(tmp_path):
    (line,) = problems(tmp_path, 'extends = "llama_3_8b"\n')
    assert line.endswith("(did you mean 'fragments/llama_3_8b.toml'?)")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "steps = 4k",
            "(column 10): expected a number without a unit (4096, 3e-4), true or false, or text in ",
        ),
        (
            "compile = True",
            ": Invalid value (column 11): expected a number without a unit (4096, 3e-4), true or",
        ),
        ("steps = 3\nsteps = 4", ": Cannot overwrite a value (column 10): steps is there already"),
        ('name = "a" b', "Expected newline or end of document after a statement (column 12)"),
    ],
)
def test_a_line_that_is_no_toml_is_told_what_toml_has(tmp_path, line, text):
    (problem,) = problems(tmp_path, f"[run]\n{line}\n")
    assert text in problem
    assert ("expected a number" in problem) == ("expected a number" in text)


def test_extends_takes_the_name_of_a_shipped_recipe_as_run_does(tmp_path):
    for name in ("laptop", "laptop.toml"):
        basic, own = file_sources(write(tmp_path, f'extends = "{name}"\n'))
        assert (basic.label.rpartition("/")[2], own.data) == ("laptop.toml", {})


def test_missing_recipe_suggests_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"laptopp: no such recipe \(did you mean 'laptop'\?\)"):
        load_recipe("laptopp")


def test_folder_in_place_of_a_recipe_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="is a folder"):
        load_recipe(tmp_path)


LONG, SPACED = "x" * 5000, "a b " * 1250


@pytest.mark.parametrize("value", [LONG, SPACED], ids=["word", "words"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("heads = 4", 'norm = "{}"\nheads = 4'),
        ("steps = 3", 'steps = "{}"'),
        ("steps = 3", '"{}" = 3'),
        ('"transformer"', '"{}"'),
        ("[run]", 'extends = "{}"\n[run]'),
        ("[run]", 'requires = ["{}"]\n[run]'),
    ],
)
def test_a_long_value_is_quoted_without_its_middle(tmp_path, capsys, old, new, value):
    path = write(tmp_path, SMALL.replace(old, new.format(value), 1))
    assert main(["check", str(path)]) == Exit.USER
    said = capsys.readouterr().err
    assert max(map(len, said.splitlines())) < 1000
    assert "[... 5," in said or "[... 10," in said  # characters, with what else is in the word or line


@pytest.mark.parametrize(
    "words",
    [
        ["check", LONG],
        ["check", "recipe.toml", "--set", LONG],
        ["check", "recipe.toml", "--no-plugin", LONG],
        ["run", "recipe.toml", "--nproc", LONG],
        ["run", "recipe.toml", "--weights", LONG],
        ["run", "recipe.toml", "--folder", LONG],
        ["run", "recipe.toml", "--folder", "new", "--resume", LONG],
        ["ckpt", "ls", LONG],
        ["ckpt", LONG],
        [LONG],
    ],
    ids=lambda words: " ".join(word[:9] for word in words),
)
def test_a_long_word_of_the_command_line_is_told_shortened(tmp_path, capsys, monkeypatch, words):
    """Paths that the system refuses for their length were tracebacks."""
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    try:
        code = main(words)
    except SystemExit as end:  # of argparse
        code = end.code
    said = capsys.readouterr().err
    assert code == Exit.USER
    assert "[... 5,0" in said
    assert max(map(len, said.splitlines())) < 1000


def test_an_integer_of_thousands_of_digits_is_refused(tmp_path):
    nines = "9" * 5000
    (line,) = problems(tmp_path, SMALL.replace("steps = 3", f"steps = {nines}"))
    assert line == "recipe.toml: an integer has thousands of digits"
    (line,) = problems(tmp_path, overrides=[f"run.steps={nines}"])
    assert line == "--set #1: run.steps: an integer has thousands of digits"
