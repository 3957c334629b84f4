"""``nanotrain launch``: what its scripts say, read by the parsers of those who take them; and mistakes."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml
from nanotrain_launch import fits
from stand_ins import TINY, after

from nanotrain_core.cli import main
from nanotrain_core.errors import Exit, NanotrainError

NEEDED = {
    "slurm": [],
    "k8s": ["--option", "image=registry.example/x:1", "--option", "pvc=shared"],
    "torchrun": ["--option", "hosts=node1,me@node2"],
    "ssh": ["--option", "hosts=node1,me@node2"],
}
AWKWARD = ["--set", "run.weights='it''s $(HOME) here'", "--env", "NOTE=a 'quoted' $(rm) `x`"]


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """Write a script for two nodes, without planning, and return it."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)

    def launch(target, *words, nodes=2, recipe="tiny.toml"):
        command = ["launch", target, recipe, "--nodes", str(nodes), "--no-plan", *NEEDED[target], *words]
        code = main(command)
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    return launch


#: Of sbatch(1), what the scripts may use, and the form of each value.
SBATCH = {
    "job-name": r"[\w-]+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "gres": r"[\w:,]+",
    "exclusive": "",
    "no-kill": "",
    "mem": r"\d+[KMGT]?",
    "cpus-per-task": r"\d+",
    "partition": r"[\w,-]+",
    "account": r"\w+",
    "time": r"(\d+-)?\d+(:\d+){0,2}",
    "output": r"\S+",
    "open-mode": "append|truncate",
    "signal": r"([RB]+:)?([A-Z0-9]+)(@\d+)?",
    "requeue": "",
    "constraint": r"\S+",
}


def read_sbatch(script):
    """Return the options of a batch script, as sbatch reads them: until the first line that is no comment."""
    found = {}
    lines = script.splitlines()
    assert lines[0].startswith("#!")
    for line in lines:
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            (word,) = shlex.split(line.removeprefix("#SBATCH"))
            key, _, value = word.removeprefix("--").partition("=")
            assert re.fullmatch(SBATCH[key], value), line
            assert key not in found
            found[key] = value
    assert sum("#SBATCH" in line for line in lines) == len(found)  # none is below a command
    return found


def words_of(script):
    """Return the words of the command that calls nanotrain, as the shell sees them."""
    command = re.search(
        r"^\s*(?:exec )?\S*(?:nanotrain|python\S* -m nanotrain_core.cli) run (?:.*\\\n)*.*",
        script,
        re.MULTILINE,
    )[0]
    return shlex.split(command.replace("\\\n", " "))


def test_data_that_is_not_here_is_noted_and_stops_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    change = ["--set", 'data={use="text",paths=["/cluster/corpus"]}']
    assert main(["launch", "slurm", "tiny.toml", "--nodes", "2", "--no-plan", *change]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!")
    (note,) = [line for line in err.splitlines() if "data.paths.0" in line]
    assert note.startswith("nanotrain: note: on this machine data.paths.0: ")
    assert "/cluster/corpus" in note
    assert note.endswith("; each node checks this when it starts")


def test_a_batch_script_asks_for_what_the_recipe_needs(launch):
    script = launch("slurm", "--option", "partition=gpu", "--option", "time=1-12:00:00")
    options = read_sbatch(script)
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "1", "2")
    assert (options["partition"], options["time"], options["job-name"]) == ("gpu", "1-12:00:00", "tiny-run-1")
    assert options["open-mode"] == "append"  # or a job that is requeued would lose its log
    assert options["signal"] == "B:TERM@150"  # run.grace and a minute
    assert {"requeue", "exclusive"} <= options.keys()
    words = words_of(script)
    assert (after(words, "--nnodes"), after(words, "--nproc"), after(words, "--resume")) == ("2", "2", "auto")
    assert after(words, "--folder") == "runs/Tiny Run/1"


def test_a_batch_script_for_cpus_asks_for_no_gpus_and_gres_takes_their_place(launch):
    assert "gpus-per-node" not in read_sbatch(launch("slurm", "--set", "run.device=cpu"))
    options = read_sbatch(launch("slurm", "--option", "gres=gpu:h100:2", "--option", "exclusive=no"))
    assert "exclusive" not in options
    assert "gpus-per-node" not in options
    assert options["gres"] == "gpu:h100:2"


@pytest.mark.parametrize("grace", [1, 30, 119.2, 3600])
def test_no_cluster_kills_before_run_grace_is_over(launch, grace):
    changed = ["--set", f"run.grace={grace}", "--option"]
    slurm = read_sbatch(launch("slurm", *changed, "time=1-0"))["signal"]
    assert int(slurm.rpartition("@")[2]) > grace
    _, job = yaml.safe_load_all(launch("k8s", *changed, "shm=1Gi"))
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > grace
    torchrun = launch("torchrun", *changed, "port=29500")
    assert int(re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", torchrun)[1]) > grace


@pytest.mark.parametrize("target", ["slurm", "torchrun", "ssh"])
def test_shells_take_the_scripts_and_carry_overrides_as_they_are(launch, tmp_path, target):
    weights, note = AWKWARD[1], AWKWARD[3]
    Path("it's $(HOME) here").touch()
    script = launch(target, *AWKWARD)
    path = tmp_path / "script"
    path.write_text(script if script.startswith("#!") else f"#!/usr/bin/env bash\n{script}")
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        # SC2016 is of `$` in single quotes, which is what keeps it.
        subprocess.run(["shellcheck", "--severity=style", "--exclude=SC2016", path], check=True)
    if target == "torchrun":
        words = shlex.split(script.splitlines()[-1])
    else:
        words = words_of(script)
        (line,) = re.findall(r"^export NOTE=.*", script, re.MULTILINE)
        words += shlex.split(line)
    assert after(words, "--set") == weights
    assert note in words


def test_a_line_break_in_a_word_becomes_no_line_of_a_script(launch, capsys):
    words = ["launch", "ssh", "tiny.toml", "--nodes", "2", *NEEDED["ssh"], "--no-plan"]
    assert main([*words, "--set", "run.name=a\nEND\nrm x"]) == 2
    assert "line break" in capsys.readouterr().err


def schema(kind):
    text = Path(__file__).with_name("kubernetes-1.34.json").read_text()
    return {**json.loads(text), "$ref": f"#/definitions/io.k8s.api.{kind}"}


def test_kubernetes_takes_the_job_and_its_service(launch):
    more = ["--option", "memory=500Gi", "--option", "cpu=64", "--option", "priority=high", *AWKWARD]
    Path("it's $(HOME) here").touch()
    service, job = yaml.safe_load_all(launch("k8s", *more))
    jsonschema.validate(service, schema("core.v1.Service"))
    jsonschema.validate(job, schema("batch.v1.Job"))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy is for no other
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "64", "memory": "500Gi", "nvidia.com/gpu": 2}
    # A headless Service that selects the pods by their labels, named as their subdomain.
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert pod["subdomain"] == service["metadata"]["name"]
    name, arguments = job["metadata"]["name"], container["args"]
    host, _, port = after(arguments, "--rdzv-endpoint").rpartition(":")
    assert host == f"{name}-0.{pod['subdomain']}.default.svc.cluster.local"
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert after(arguments, "--set") == AWKWARD[1].replace("$(", "$$(")  # Kubernetes would replace it
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[mounts[container["workingDir"]]]["persistentVolumeClaim"]["claimName"] == "shared"


def outcome(rules, code):
    """Return what a Job does about a pod's exit code: the first rule that has it counts."""
    for rule in rules:
        if code in rule.get("onExitCodes", {}).get("values", ()):
            return rule["action"]
    return "Count"


def test_kubernetes_goes_by_the_exit_codes(launch):
    _, job = yaml.safe_load_all(launch("k8s"))
    rules = job["spec"]["podFailurePolicy"]["rules"]
    done = {code: outcome(rules, code) for name, code in vars(Exit).items() if name.isupper() and code}
    assert done == {
        Exit.FAILED: "Count",
        Exit.HUNG: "Count",
        Exit.PREEMPTED: "Ignore",
        **dict.fromkeys([Exit.USER, Exit.DIVERGED, Exit.LOCKED, Exit.CORRUPTED, Exit.UNSAVED], "FailJob"),
        Exit.INTERRUPTED: "FailJob",
    }
    assert all(sorted(rule["onExitCodes"]["values"]) == rule["onExitCodes"]["values"] for rule in rules[1:])


def test_torchrun_has_a_line_for_each_node(launch):
    lines = [line for line in launch("torchrun").splitlines() if "torchrun " in line and line[0] != "#"]
    words = [shlex.split(line) for line in lines]
    assert ["--local-addr=node1" in words[0], "--local-addr=node2" in words[1]] == [True, True]
    for line in words:
        assert {"--nnodes=2", "--nproc-per-node=2", "--rdzv-endpoint=node1:29400"} <= set(line)
        assert line[line.index("-m") + 1 : line.index("-m") + 4] == ["nanotrain_core.cli", "run", "tiny.toml"]


@pytest.mark.parametrize("target", ["slurm", "ssh", "k8s"])
def test_a_run_that_may_go_on_with_fewer_hosts_is_not_ended_with_one(launch, target):
    """sbatch and srun end what a failed node was part of, unless they are told not to."""
    script = launch(target, "--min-nnodes", "1", "--max-restarts", "3")
    if target == "k8s":
        _, job = yaml.safe_load_all(script)
        words = job["spec"]["template"]["spec"]["containers"][0]["args"]
    else:
        words = words_of(script)
    sizes = after(words, "--nnodes"), after(words, "--min-nnodes"), after(words, "--max-restarts")
    assert sizes == ("2", "1", "3")
    if target == "slurm":
        assert "no-kill" in read_sbatch(script)
        assert script.count("--no-kill") == 2
        assert "no-kill" not in launch(target)
        assert "--wait=0 " in script  # an unlimited wait: a launcher may leave, and the others go on


@pytest.mark.parametrize("target", ["slurm", "ssh", "k8s"])
def test_hosts_are_examined_before_they_join(launch, target):
    """The command of a node is the doctor's, followed by what it is without it."""
    command = ["--option", "command='/my venv/nanotrain' -q"]
    plain, checked = (launch(target, *command, *more) for more in ((), ("--check-hosts",)))
    if target == "k8s":
        pods = [[*yaml.safe_load_all(script)][1]["spec"]["template"]["spec"] for script in (plain, checked)]
        whole = [[*pod["containers"][0]["command"], *pod["containers"][0]["args"]] for pod in pods]
    else:
        bodies = [re.sub(r"(?m)^#.*\n", "", script) for script in (plain, checked)]
        lines = [re.match(r"(?:.*\\\n)*.*", body[body.index("'/my venv") :])[0] for body in bodies]
        whole = [shlex.split(line.replace("\\\n", " ")) for line in lines]
    doctor = ["/my venv/nanotrain", "-q", "doctor", "--quick", "--folder", "runs/Tiny Run/1", "--then"]
    assert whole[1] == [*doctor, *whole[0]]


@pytest.mark.parametrize("target", ["slurm", "torchrun", "ssh", "k8s"])
def test_paths_with_a_space_are_one_word(launch, target):
    Path("my recipes").mkdir()
    Path("my recipes/tiny.toml").write_text(TINY)
    command = f"command='/my venv/{'torchrun' if target == 'torchrun' else 'nanotrain'}'"
    more = ["--folder", "my runs/a", "--set", "run.name='b c'", "--option", command]
    script = launch(target, *more, recipe="my recipes/tiny.toml")
    if target == "k8s":
        _, job = yaml.safe_load_all(script)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        words = [*container["command"], *container["args"]]
    elif target == "torchrun":
        words = shlex.split(script.splitlines()[-1])
    else:
        begin = script.rindex("'/my venv")
        words = shlex.split(re.match(r"(?:.*\\\n)*.*", script[begin:])[0].replace("\\\n", " "))
    assert shlex.split(command)[0].partition("=")[2] in words
    assert words[words.index("run") + 1] == "my recipes/tiny.toml"
    assert after(words, "--folder") == "my runs/a"


def test_out_writes_a_file_that_runs(launch, tmp_path):
    assert launch("ssh", "--out", "go.sh") == "wrote go.sh\n"
    assert (tmp_path / "go.sh").stat().st_mode & 0o111
    assert launch("k8s", "--out", "job.yaml") == "wrote job.yaml\n"
    assert not (tmp_path / "job.yaml").stat().st_mode & 0o111
    (tmp_path / "link.sh").symlink_to("target.sh")
    launch("ssh", "--out", "link.sh")
    assert (tmp_path / "link.sh").is_symlink()
    assert (tmp_path / "target.sh").read_text().startswith("#!")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("slurm", "nanotrain: give the number of machines with --nodes N\n"),
        (
            "slurm --nodes 3",
            "--nodes 3: run.ranks = 4 cannot be shared evenly by 3 nodes: give the ranks of a node with "
            "--nproc N (as many as it has GPUs), or --nodes 2 or 4\n",
        ),
        ("slurm --nnodes 3", "--nnodes 3: run.ranks = 4 cannot be shared evenly by 3 nodes: "),
        ("slurm --nodes 4 --nnodes 2", "nanotrain: --nodes 4, but --nnodes 2: give one of them\n"),
        ("slurm --nodes 3 --nproc 1 --set topology.tp=2", "nanotrain: --nproc x --nodes: run.ranks: 3 ranks"),
        ("slurm --nnodes 2 --min-nnodes 3", "--min-nnodes 3: expected at most --nnodes, which is 2"),
        (
            "slurm --nodes 2 --option partitoin=x",
            "slurm has no option 'partitoin' (did you mean 'partition'?)",
        ),
        ("slurm --nodes 2 --option partition", "expected KEY=VALUE"),
        ("slurm --nodes 2 --option time=soon", "expected a time limit as sbatch takes it, for example time="),
        ("slurm --nodes 2 --option time=2", "the job would be told to end 150 s before that"),
        ("slurm --nodes 2 --option mem=1 --option mem=2", "given twice: mem is '1' already"),
        ("slurm --nodes 2 --option account=a;rm", "expected an account"),
        ("slurm --nodes 2 --env 1X=2", "expected NAME=VALUE"),
        ("slurm --nodes 2 --set run.steps=x", "run.steps"),
        ("slurm --nodes 2 --set topology.tp=3", "tp"),
        ("slurm --nodes 2 --min-nnodes 3", "--min-nnodes 3: expected at most --nodes, which is 2"),
        ("slurm --nodes 2 --min-nnodes 1", "--min-nnodes 1: all ranks start again where a machine is lost"),
        (
            "torchrun --nodes 2 --min-nnodes 1 --max-restarts 1 --option hosts=a,b",
            "--min-nnodes: launchers of nanotrain go on with fewer hosts",
        ),
        ("slurm --nodes 2 --option command='a", "no closing quotation"),
        ("torchrun --nodes 2 --check-hosts --option hosts=a,b", "--check-hosts: torchrun starts ranks"),
        ("k8s --nodes 2", "k8s needs --option image"),
        ("ssh --nodes 2 --option hosts=a", "hosts=a: 2 nodes need as many host names, got 1"),
        ("ssh --nodes 2 --option hosts=a,a", "hosts=a,a: a is named twice"),
        ("ssh --nodes 2 --option hosts=a,", "expected names with one comma between them, as in node1,node2"),
        ("ssh --nodes 2 --hosts=a,b", "KEY=VALUE, a target's options are given by --option KEY=VALUE; "),
        ("slurm --nodes 2 --time=3", "a target's options are given by --option KEY=VALUE; "),
        ("ssh --nodes 2 --option hosts=a,b --option port=70000", "expected the port where they meet, from 1"),
    ],
)
def test_mistakes_are_told_in_a_line(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    target, *rest = words.split(" ")
    assert main(["launch", target, "tiny.toml", "--no-plan", *rest]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nodes", "0"], "--nodes: expected a whole number above 0, got '0'"),
        (["--nodes", "2", "--min-nnodes", "0"], "--min-nnodes: expected a whole number above 0, got '0'"),
        (["--nodes", "two"], "--nodes: expected a whole number above 0, got 'two'"),
        (["--nodes", "2", "--max-restarts", "-1"], "--max-restarts: expected 0 or a whole number above it"),
    ],
)
def test_wrong_numbers_are_told_what_is_expected(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "slurm", "tiny.toml", "--no-plan", *words])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "told"),
    [
        ("no/such/folder/x", "there is no folder no/such/folder"),
        (".", "expected a file, this is a folder"),
        ("", "expected a file, this is a folder"),
        ("tiny.toml", "this is the recipe, which would be lost"),
        ("/proc/x", "cannot be written: "),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_the_plan(tmp_path, monkeypatch, capsys, out, told):
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    monkeypatch.setattr("nanotrain_launch.command._planned", lambda *_: pytest.fail("planned"))
    assert main(["launch", "slurm", "tiny.toml", "--nodes", "2", "--out", out]) == 2
    assert capsys.readouterr().err.startswith(f"nanotrain: --out {out}: {told}")


def test_hardware_that_a_component_refuses_is_refused():
    fits.refuse_other_hardware({"refusals": []}, "h100")
    fits.refuse_other_hardware({}, "h100")  # of an earlier nanotrain-plan
    why = "precision 'fp8': tiles of 128 need compute capability 9.0, this is 10.0"
    with pytest.raises(NanotrainError, match=f"the recipe cannot run on b200: {why}\n.*--no-plan"):
        fits.refuse_other_hardware({"refusals": [why]}, "b200")


def test_what_does_not_fit_is_refused_in_units_that_suit_it():
    host = {"fits": True, "total": 3e12, "available": 2e12, "checkpoint": 2.5e12}
    host |= {"offloaded": 0, "activations": 0, "processes": 5e11}
    memory = {"fits": False, "peak": 95.37e9, "usable": 81.9e9, "where": "F0.0"}
    for fitting, told in (
        (
            {"memory": memory, "host_memory": host},
            "does not fit h100: a rank needs 95.4 GB of memory at its peak (F0.0), and can have 81.9 GB\n"
            "to see which changes would make it fit: nanotrain plan x.toml --hardware h100\n",
        ),
        (
            {"memory": memory | {"fits": True}, "host_memory": host | {"fits": False}},
            "does not fit h100: a host needs 3 TB of memory, most of it for a checkpoint, and has 2 TB\n",
        ),
    ):
        with pytest.raises(NanotrainError) as caught:
            fits.refuse_what_does_not_fit(fitting, ["x.toml"], "h100")
        assert told in str(caught.value)


def test_a_plan_is_summed_up_in_units_that_suit_it():
    memory = {"peak": 41_700_000, "usable": 81.9e9}
    small = fits.summary({"memory": memory, "time": {"step": 0.00641}}, "h100")
    assert small == "a rank needs 41.7 MB of 81.9 GB of memory on h100, a step takes 6.41 ms"


def test_a_node_that_is_given_more_ranks_than_it_has_devices_is_refused():
    found = {"hardware": {"devices_per_node": 8, "cores": 0}}
    fits.refuse_larger_nodes(found, 8, 2048, "h100")
    told = "--nproc 512: a node of h100 has 8 devices, one for each rank: 2048 ranks need --nodes 256"
    with pytest.raises(NanotrainError, match=told):
        fits.refuse_larger_nodes(found, 512, 2048, "h100")
    fits.refuse_larger_nodes({"hardware": {"devices_per_node": 8, "cores": 1}}, 16, 16, "cpu")
