"""``nanotrain plan`` on recipes of the core: its table, its JSON, its errors."""

import re
from pathlib import Path
from unittest import mock

import pytest
from nanotrain_plan.hardware import shipped
from nanotrain_plan.rendering import terminal
from nanotrain_plan.rendering.terminal import plain_console

from nanotrain_core.cli import main


def test_nothing_is_said_of_experts_where_there_are_none(recipe, capsys):
    """The layout has a view of them, which no parameter lies in."""
    assert main(["plan", recipe, "--ranks", "2", "--hardware", "cpu", "--no-advice"]) in (0, 2)
    printed = capsys.readouterr().out
    assert "(dense: dp 2)" in printed
    assert "expert" not in printed
    assert "edp" not in printed


def test_every_key_of_the_json_is_in_the_documentation(recipe, planned):
    words = [recipe, "--ranks", "2", "--hardware", "cpu"]
    code, plan = planned(*words, "--simulate", "--draws", "5", "--sweep", "3")
    assert code == 0
    named = {"layers", "left_out", "layout"}  # by names of layers, by reasons, by mesh dimensions

    def keys(value):
        if isinstance(value, list):
            return {key for each in value for key in keys(each)}
        if not isinstance(value, dict):
            return set()
        return {*value} | {key for name in value if name not in named for key in keys(value[name])}

    document = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    told = set(re.findall(r"`(\w+)`", document[document.index("## JSON") :]))
    hardware = plan.pop("hardware")
    assert not {*keys(plan), *plan["layout"]} - told
    assert not keys(hardware) - set(re.findall(r"`\[?(\w+)\]?`", document))


def test_the_whole_run_follows_from_the_step(recipe, planned):
    _, plan = planned(recipe, "--hardware", "cpu")
    time = plan["time"]
    assert time["run"] == pytest.approx(10 * time["step"])
    assert time["tokens_per_second"] == pytest.approx(8 * 32 / time["step"])
    flops = plan["flops_per_token"]["model"] * time["tokens_per_second"]
    assert time["model_tflops_per_device"] == pytest.approx(flops / 1e12)
    assert plan["pipeline"]["bubble"] == pytest.approx(0.0, abs=1e-9)


def test_a_bubble_of_uneven_stages_is_told_from_the_schedules(recipe, capsys):
    """Three layers over two ranks leave one with less to do; the other one idles as 1F1B has it: 1 / 65."""
    words = [
        recipe,
        "--ranks",
        "2",
        "--hardware",
        "cpu",
        "--set",
        "topology.pp=2",
        "--set",
        "schedule.use=1f1b",
    ]
    assert main(["plan", *words, "--set", "batch.sequences=128"]) in (0, 2)
    bubble, idle = re.findall(r"(?:bubble|idle by rank) .*%.*", capsys.readouterr().out)
    assert "(1f1b, 64 microbatches); 1.5% on pp " in bubble
    shares = [float(share) for share in re.findall(r"pp \d (\d+\.\d)%", idle)]
    assert min(shares) == 1.5
    assert float(re.search(r"(\d+\.\d)%", bubble)[1]) == pytest.approx(sum(shares) / 2, abs=0.1)


def test_a_precision_does_not_change_how_much_is_multiplied(recipe, planned):
    """The head's weight gradient is a product added to a total, in one operator or two."""
    made = {}
    for precision in ("bf16", "fp32", "fp16", "fp64"):
        words = ["--set", f'precision.use="{precision}"', "--set", "model.vocab=4096"]
        _, made[precision] = planned(recipe, "--hardware", "h100", *words)
    flops = {precision: plan["flops_per_token"] for precision, plan in made.items()}
    assert flops["bf16"]["executed"] > flops["bf16"]["model"]
    assert len({each["executed"] for each in flops.values()}) == 1
    seconds = {precision: plan["time"]["busiest"]["gemm"] for precision, plan in made.items()}
    assert seconds["bf16"] == seconds["fp16"] < seconds["fp32"]


def test_a_device_that_is_faster_than_its_host_waits_for_it(recipe, tmp_path, planned):
    """A model of width 64 took 0.1 ms a step on an H100, in which no host launches its kernels."""
    times = {}
    for launch in (0, 100, 200):
        path = tmp_path / f"{launch}.toml"
        path.write_text(f"launch_us = {launch}\n" + shipped()["h100"].read_text())
        times[launch] = planned(recipe, "--hardware", str(path))[1]["time"]
    assert times[0]["busiest"]["host"] == 0.0
    # Launching is all there is, so twice as long is twice as much, and what the device does is hidden.
    waits = [times[launch]["busiest"] for launch in (100, 200)]
    hosts = [sum(each.values()) for each in waits]
    assert hosts[1] == pytest.approx(2 * hosts[0], rel=1e-9)
    assert times[200]["step"] == pytest.approx(2 * times[100]["step"], rel=1e-9)
    assert times[100]["step"] > 10 * times[0]["step"]


def test_a_table_is_printed(recipe, capsys):
    assert main(["plan", recipe]) == 0
    out = capsys.readouterr().out
    for heading in ("Memory of a rank", "Activations", "Time", "Assumptions", "fits"):
        assert heading in out


def test_device_hours_of_a_small_run_are_not_rounded_to_none(recipe, capsys):
    told = []
    for steps in ("10", "100000"):
        words = ["--hardware", "cpu", "--set", "model.layers=1", "--set", f"run.steps={steps}"]
        assert main(["plan", recipe, *words]) == 0
        told += re.findall(r"(\S+(?: than \S+)?) device-hours", capsys.readouterr().out)
    assert told[0].endswith("than 0.01")
    assert 0.01 <= float(told[1]) < 1


def test_a_node_has_as_many_ranks_as_nproc_says(recipe, planned):
    """Two ranks on each of four nodes sum gradients through two NICs of a node, and share its memory."""
    pytest.importorskip("nanotrain_ddp")
    both = ("--set", 'parallel=[{use="ddp"}]', "--set", "batch.sequences=16", "--hardware", "h100")
    seconds, ranks = [], []
    for words in (("--nproc", "8"), ("--nproc", "2", "--nnodes", "4"), ("--nproc", "16")):  # of 8
        _, plan = planned(recipe, *both, *words)
        synced = [each for each in plan["collectives"]["of_a_step"] if each["axis"] == "dp"]
        seconds.append(sum(each["seconds"] for each in synced))
        ranks.append(plan["host_memory"]["ranks"])
    assert ranks == [8, 2, 16]
    assert seconds[1] > seconds[0]


def test_a_sweep_ranks_layouts_by_tokens_per_second(recipe, planned):
    _, plan = planned(recipe, "--hardware", "cpu", "--set", "model.layers=1", "--sweep", "3")
    found = plan["sweep"]["candidates"]
    rates = [each["tokens_per_second"] for each in found]
    assert rates == sorted(rates, reverse=True)
    (own,) = [each for each in found if "as it is" in each["layout"]]
    assert own["tokens_per_second"] == plan["time"]["tokens_per_second"]
    assert own["peak"] == plan["memory"]["peak"]
    # The recipe fits without recomputing anything, so that is all there is to compare.
    assert plan["sweep"]["left_out"]["recomputes more than it needs to fit"] == 2
    counts = [plan["sweep"][key] for key in ("examined", "planned", "bounded", "refused")]
    assert counts == [3, 1, 2, 0]


def test_a_sweep_counts_the_recipe_and_names_the_microbatches_that_ranks_have(recipe, capsys):
    """The recipe's layout is that of the grid with microbatches of 2: a rank of 8 has no more of 16."""
    pytest.importorskip("nanotrain_ddp")
    words = ["--ranks", "8", "--set", "batch.microbatch=16", "--set", "batch.sequences=16", "--sweep", "1"]
    layers = ["--set", "model.layers=1", "--set", 'parallel=[{use="ddp"}]']
    assert main(["plan", recipe, "--hardware", "cpu", *words, *layers]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "1 layouts: 1 planned, 0 left out by bounds, 0 refused. With the recipe as it is, 1 of 1 fit." in told
    )
    assert re.search(r"dp 8, microbatch 2, no recompute, adamw \(as it is\)", told)
    assert "microbatch 16" not in told


def test_a_run_with_slow_ranks_and_failures_is_simulated(recipe, planned, capsys):
    words = ["--simulate", "--slow-ranks", "1", "--slow-factor", "2", "--failure-hours", "2", "--draws", "10"]
    words = [recipe, "--hardware", "cpu", "--set", "model.layers=1", "--checkpoint-minutes", "10", *words]
    _, plan = planned(*words)
    found = plan["simulation"]
    assert found["steps"]["ideal"] == pytest.approx(plan["time"]["step"])
    assert found["steps"]["p50"] == pytest.approx(2 * plan["time"]["step"])  # every rank is slow
    assert found["goodput"]["own"]["interval"] == 600
    assert found["failures"]["mean"] == 7200
    assert found["goodput"]["best"]["simulated"] >= found["goodput"]["own"]["simulated"]
    assert main(["plan", *words]) == 0
    assert "Young 1974" in capsys.readouterr().out
    seldom = ["--set", 'checkpoint={use="simple", every=1000000000}', "--simulate", "--failure-hours", "2"]
    assert main(["plan", recipe, "--hardware", "cpu", "--set", "model.layers=1", *seldom]) == 2
    error = capsys.readouterr().err
    assert "minutes of training between checkpoints, and the run fails every 120, so that" in error
    assert "expected at most 600, such as --checkpoint-minutes " in error


def test_a_page_has_the_table_and_the_timeline(recipe, tmp_path):
    path = tmp_path / "plan.html"
    assert main(["plan", recipe, "--set", "model.layers=1", "--html", str(path)]) == 0
    text = path.read_text()
    assert "<title>F0.0:" in text
    assert "Memory of a rank" in text
    assert "<script" not in text
    assert "http" not in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--hardware", "h1000"], "no hardware is named 'h1000'"),
        (["--ranks", "2", "--nproc", "4"], "--ranks 2, but --nproc = 4: give one of them"),
        (["--set", "topology.tp=2", "--ranks", "3"], "nanotrain: --ranks: run.ranks: 3 ranks do not fit"),
        (["--set", "topology.tp=2", "--nnodes", "3"], "nanotrain: --nnodes: run.ranks: 3 ranks do not fit"),
        (
            ["--set", "topology.tp=2", "--nproc", "1", "--nnodes", "3"],
            "nanotrain: --nproc x --nnodes: run.ranks",
        ),
        (["--html", ""], "nanotrain: --html : expected a file, this is a folder"),
        (["--hardware", ""], "nanotrain: --hardware: no hardware is named ''; expected one of a100, "),
        (["--html", "/proc/plan.html"], "nanotrain: --html /proc/plan.html: cannot be written: "),
        (["--set", "batch.microbatches=1"], "batch.microbatches"),
        (
            ["--simulate", "--times", "none.json"],
            "nanotrain: --times: none.json: No such file or directory\n",
        ),
        (["--times", "none.json"], "nanotrain: --times is of the simulation: add --simulate\n"),
        (
            ["--simulate", "--failure-hours", "0.01"],
            "--restart-minutes 5: the run fails every 0.6 minutes, so that it would hardly ever go on; "
            "expected at most 3\n",
        ),
        (
            ["--simulate", "--failure-hours", "1", "--checkpoint-minutes", "900"],
            "--checkpoint-minutes 900: the run fails every 60 minutes",
        ),
        (["--failure-hours", "3"], "--failure-hours is of the simulation"),
    ],
)
def test_mistakes_are_told_in_a_line_before_the_plan(recipe, words, told, capsys):
    with mock.patch("nanotrain_plan.plan.make_plan", side_effect=AssertionError):
        assert main(["plan", recipe, *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sweep", "-1"], "--sweep: expected a whole number above 0, got '-1'"),
        (["--ranks", "0"], "--ranks: expected a whole number above 0, got '0'"),
        (["--draws", "2.5"], "--draws: expected a whole number from 1 to 1,000,000, got '2.5'"),
        (["--seed", "1e400"], "--seed: expected a whole number from 0 to"),
        (["--slow-ranks", "nan"], "--slow-ranks: expected a fraction from 0 to 1, got 'nan'"),
    ],
)
def test_wrong_numbers_are_told_what_is_expected(recipe, words, told, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", recipe, *words])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("forward = 1", "not JSON: Expecting value: line 1 column 1"),
        ("[1]", 'expected an object such as {"forward": 0.1, "backward": 0.2}'),
        ('{"foward": 1}', "foward: no such key (did you mean 'forward'?); keys: forward, backward"),
        (
            '{"forward": 1}',
            "backward: expected a number of seconds, or several, one for each stage, got nothing",
        ),
        ('{"forward": [1, -1], "backward": 1}', "forward: expected a number of seconds"),
    ],
)
def test_a_wrong_file_of_times_is_told_before_the_plan(recipe, text, told, tmp_path, capsys):
    path = tmp_path / "times.json"
    path.write_text(text)
    with mock.patch("nanotrain_plan.plan.make_plan", side_effect=AssertionError):
        assert main(["plan", recipe, "--simulate", "--times", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"nanotrain: --times: {path}: {told}")


PHASES = """
[[phase]]
name = "grow"
until_tokens = 1600
batch.sequences = { start = 6, end = 10, by = 2 }
[[phase]]
until_tokens = 4000
batch.sequences = 12
"""


def test_a_phase_takes_as_long_as_a_recipe_with_its_batch(recipe, tmp_path, planned):
    path = tmp_path / "phases.toml"
    saves = '[checkpoint]\nuse = "simple"\nevery = 4\n'
    path.write_text(Path(recipe).read_text().replace("steps = 10\n", "") + saves + PHASES)
    simulated = ["--simulate", "--slow-ranks", "0", "--draws", "1"]
    code, plan = planned(str(path), "--hardware", "cpu", *simulated)
    step = {}
    for sequences in (6, 8, 12):
        path.write_text(Path(recipe).read_text().replace("sequences = 8", f"sequences = {sequences}"))
        step[sequences] = planned(str(path), "--hardware", "cpu")[1]["time"]["step"]
    grow, rest = plan["phases"]
    assert code == 0
    # 192 tokens a step until half of the way, 5 steps to 960; then 256, 3 steps to 1728; then 384, 6 to 4032.
    assert (grow["name"], grow["steps"], grow["tokens"], grow["sequences"]) == ("grow", 8, 1728, [6, 8])
    assert (rest["name"], rest["steps"], rest["tokens"]) == ("phase 1", 6, 2304)
    assert grow["step"] == pytest.approx([step[6], step[8]], rel=1e-9)
    assert plan["time"]["step"] == pytest.approx(step[12], rel=1e-9)
    by_hand = 5 * step[6] + 3 * step[8] + 6 * step[12]
    assert plan["time"]["run"] == grow["seconds"] + rest["seconds"] == pytest.approx(by_hand, rel=1e-9)
    assert plan["data"]["tokens"] == 4032
    between = plan["simulation"]["goodput"]["own"]["interval"]
    assert between == pytest.approx(4 * by_hand / 14, rel=1e-9)  # 4 steps of the run's mean


def test_a_plan_says_of_which_phase_its_rates_are(recipe, planned, capsys):
    named = '{name="8K",batch={sequences=12}}'
    for last, name, told in (
        (named, "8K", " in phase '8K'"),
        (named.replace('name="8K",', ""), "phase 1", " in phase 1"),
        (None, "", ""),
    ):
        words = [recipe, "--hardware", "cpu"]
        if last:
            words += ["--set", f'phase=[{{name="first",until_tokens=256}},{last}]']
        assert planned(*words)[1]["time"]["phase"] == name
        assert main(["plan", *words]) == 0
        out = capsys.readouterr().out
        title = " ".join(out.partition("Model")[0].split())
        assert re.search(rf"tokens/s{told}, MFU", title), title
        assert re.search(rf"step +\S+ m?s{told}: pipeline", out)


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 1.0), (12, 1.5)])
def test_the_fullest_node_writes_longest(recipe, ranks, nodes, planned):
    pytest.importorskip("nanotrain_sharded_ckpt_v2")
    sharded = ["--set", 'checkpoint={use="sharded_v2",every=5}', "--set", "batch.sequences=96"]
    _, plan = planned(recipe, "--hardware", "h100", "--ranks", str(ranks), *sharded)
    disk = plan["hardware"]["disk_gb_s"] * 1e9
    assert plan["checkpoints"]["seconds"] == pytest.approx(plan["checkpoints"]["bytes"] / disk / nodes)


def test_eager_layers_move_more_and_graphs_wait_for_no_host(recipe, tmp_path, planned):
    """By the factor ``fusion``, 2.5; launches take 0 and then 1 s each, so that nothing else counts."""
    path = tmp_path / "hardware.toml"

    def busiest(launch, *words):
        path.write_text(f"launch_us = {launch}\n" + shipped()["h100"].read_text())
        time = planned(recipe, "--hardware", str(path), *words)[1]["time"]
        after.append(time["after_backward"])
        return time["busiest"]

    after: list[float] = []
    one = ("--set", "batch.microbatch=8")  # to which no gradients are added, which is never compiled
    compiled, eager = (busiest(0, *one, "--set", f"run.compile={each}") for each in ("true", "false"))
    assert eager["memory"] == pytest.approx(2.5 * compiled["memory"], rel=1e-9)
    assert eager["gemm"] == compiled["gemm"]
    assert after[0] == pytest.approx(after[1])  # the optimizer, which is never compiled
    hosts = [busiest(1e6, "--set", f"run.compile={each}")["host"] for each in ("true", "false")]
    assert hosts[1] == pytest.approx(2.5 * hosts[0], rel=1e-3)
    replayed = busiest(1e6, *one, "--set", "run.cuda_graphs=true")
    assert replayed["host"] == 0.0
    assert replayed["memory"] == compiled["memory"]


def test_assumptions_name_what_takes_time_that_is_not_counted(recipe, planned):
    masked = 'data={use="text",paths=["corpus"],tokenizer="bytes",mask_documents=true}'
    offloaded = 'optimizer={use="zero12",offload=true}'
    pytest.importorskip("nanotrain_zero12")
    for words, told in ((masked, "mask_documents' mask"), (offloaded, "its copies over PCIe")):
        _, plan = planned(recipe, "--set", words)
        assert told in str(plan["assumptions"])


def test_a_narrow_terminal_cuts_no_number(recipe, monkeypatch, capsys):
    """Memory is a line for each rank where that fits, else a column, and else lines that a terminal wraps."""
    phased = '[{name="many",until_tokens=1536},{name="few",batch={sequences=4}}]'
    words = ["plan", recipe, "--ranks", "4", "--hardware", "cpu", "--set", f"phase={phased}"]
    words += ["--set", "topology.pp=4", "--set", 'schedule.use="1f1b"']
    words += ["--set", "model.layers=4", "--set", "batch.microbatch=1", "--simulate"]
    told = {}
    for width in (40, 60, 80, 140):
        monkeypatch.setattr(terminal, "plain_console", lambda wide, width=width: plain_console(width))
        assert main(words) == 0
        tables = capsys.readouterr().out.partition("Memory of a rank")[2]
        memory = tables.partition("Activations")[0].partition("\n")[2]
        in_columns = memory.split()[:8] == ["pp", "0", "pp", "1", "pp", "2", "pp", "3"]
        assert in_columns == (width in (60, 80))
        assert width == 40 or max(map(len, memory.splitlines())) <= width
        phases = tables.partition("Phases")[2].partition("Beside")[0]
        goodputs = tables.partition("goodput, simulated")[2]
        told[width] = [sorted(re.sub("─+", "", table).split()) for table in (memory, phases, goodputs)]
    assert {"many", "few"} <= set(told[140][1])
    assert told[40] == told[60] == told[80] == told[140]


def test_assumptions_give_the_rates_of_the_dtypes_that_are_multiplied(recipe, planned):
    peaks = {"fp32": ("float32", 66.9), "bf16": ("bfloat16", 989.4)}
    for precision, (dtype, peak) in peaks.items():
        words = ["--hardware", "h100", "--set", f"precision.use={precision!r}", "--set", "model.layers=1"]
        _, plan = planned(recipe, *words)
        told = f"GEMMs reach 70% of the peak ({0.7 * peak:.4g} TFLOP/s in {dtype}), attention"
        assert plan["assumptions"][0].startswith(told)
