"""A recipe of more ranks than there are GPUs runs on as many ranks as there are, or says why it cannot."""

from pathlib import Path

import pytest

from nanotrain_core.cli import gpus, main
from nanotrain_core.errors import Exit
from nanotrain_core.launch import launcher

FLAT = str(Path(__file__).with_name("flat_topology.py"))

ON_CPU = "nanotrain: on the CPU: nanotrain run {} --set run.device=cpu\n"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a recipe where there are so many GPUs; return code, ranks that are launched, and stderr."""
    monkeypatch.chdir(Path(__file__).parents[1])

    def run(recipe, count, *words):
        launched = []
        monkeypatch.setattr(gpus, "gpus_here", lambda: count)
        monkeypatch.setattr(launcher, "start_forkserver", lambda nproc: None)
        monkeypatch.setattr(launcher, "launch", lambda job, recipe, nodes: launched.append(nodes.nproc) or 0)
        code = main(["run", str(recipe), *words])
        return code, launched, capsys.readouterr().err

    return run


def test_degrees_that_one_gpu_does_not_hold_are_named_where_they_stand(run):
    """It said '1 GPUs here, so 1 ranks', and complained of an option that nobody had given."""
    code, launched, err = run("recipes/deepseek_4d.toml", 1)
    assert (code, launched) == (Exit.USER, [])
    assert err == (
        "nanotrain: 1 GPU here, and the recipe, of 8 ranks, cannot run on 1 rank:\n"
        "nanotrain: recipes/deepseek_4d.toml:26: topology.pp = 2\n"
        "nanotrain: recipes/deepseek_4d.toml:25: topology.tp = 2\n"
        "nanotrain: recipes/deepseek_4d.toml:27: topology.ep = 2\n"
        "nanotrain: pp 2 x cp 1 x tp 2 = 4 does not divide 1; 4 or 8 ranks would do\n"
        + ON_CPU.format("recipes/deepseek_4d.toml")
    )


def test_degrees_that_do_not_fit_together_are_all_named(run):
    code, _, err = run("recipes/deepseek_4d.toml", 2)
    assert code == Exit.USER
    assert err.startswith("nanotrain: 2 GPUs here, and the recipe, of 8 ranks, cannot run on 2 ranks:\n")
    assert [line.partition("topology.")[2] for line in err.splitlines() if "topology." in line] == [
        "pp = 2",
        "tp = 2",
        "ep = 2",
    ]


def test_only_the_degree_that_is_too_large_is_named(run):
    """The words that were given come again in the command that runs on the CPU."""
    words = ["--set", "topology.pp=1", "--set", "topology.ep=4", "--set", "run.name=my run"]
    _, _, err = run("recipes/deepseek_4d.toml", 2, *words)
    assert err.splitlines()[1:] == [
        "nanotrain: --set #2: topology.ep = 4",
        "nanotrain: pp 1 x ep 4 x etp 1 = 4 does not divide 2; 4 or 8 ranks would do",
        "nanotrain: on the CPU: nanotrain run recipes/deepseek_4d.toml --set topology.pp=1 "
        "--set topology.ep=4 --set 'run.name=my run' --set run.device=cpu",
    ]


@pytest.mark.parametrize(
    ("recipe", "count", "said"),
    [
        ("recipes/deepseek_4d.toml", 4, "4 GPUs here, so 4 ranks in place of 8"),
        ("recipes/laptop.toml", 1, "1 GPU here, so 1 rank in place of 4"),
        ("recipes/laptop.toml", 2, "2 GPUs here, so 2 ranks in place of 4"),
    ],
)
def test_where_data_parallelism_can_shrink_it_does(run, recipe, count, said):
    assert run(recipe, count) == (Exit.DONE, [count], f"nanotrain: {said}\n")


@pytest.mark.parametrize("count", [0, 4, 8])
def test_where_there_are_enough_gpus_or_none_nothing_is_said(run, count):
    assert run("recipes/laptop.toml", count) == (Exit.DONE, [4], "")


def test_a_batch_that_so_many_ranks_do_not_share_is_told_with_both_ways_out(run):
    code, launched, err = run("recipes/laptop.toml", 3, "--set", "batch.microbatch=1")
    assert (code, launched) == (Exit.USER, [])
    assert err.splitlines() == [
        "nanotrain: 3 GPUs here, and the recipe, of 4 ranks, cannot run on 3 ranks:",
        "nanotrain: recipes/laptop.toml:10: batch.sequences: 16 would leave some of dp = 3 ranks without a "
        "sequence in the last of 6 microbatches, in which all take part; nearest: 15 "
        "or 18, or batch.microbatch = 2",
        "nanotrain: on 2 GPUs: nanotrain run recipes/laptop.toml --set batch.microbatch=1 --nproc 2",
        "nanotrain: on the CPU: nanotrain run recipes/laptop.toml --set batch.microbatch=1 "
        "--set run.device=cpu",
    ]


def test_ranks_that_were_asked_for_stay(run):
    assert run("recipes/deepseek_4d.toml", 1, "--nproc", "8") == (Exit.DONE, [8], "")
    assert run("recipes/deepseek_4d.toml", 1, "--set", "run.device=cpu") == (Exit.DONE, [8], "")


def test_degrees_of_another_topology_are_named_too(run):
    words = ["--plugin", FLAT, "--set", 'topology={use="flat",tp=2,way=3}']
    words += ["--set", 'parallel=[{use="tp"}, {use="ddp"}]']
    _, _, err = run("recipes/laptop.toml", 1, *words)
    assert err.splitlines()[1:3] == ["nanotrain: --set #1: topology.tp = 2", "nanotrain: 1 does not divide"]
