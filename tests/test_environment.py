"""Which rank a process is, read from what torchrun and Slurm set."""

import pytest

from nanotrain_core.errors import LaunchError
from nanotrain_core.launch.environment import MPI_SIZES, Ranks, agent_name, rendezvous_address, run_name
from nanotrain_core.run import host_processors

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "node7",
}


def test_torchrun_and_srun_give_the_same_place():
    assert Ranks.detect(TORCHRUN) == Ranks(5, 8, 1, 4, "torchrun")
    assert Ranks.detect(SRUN) == Ranks(5, 8, 1, 4, "srun")


def test_a_plain_shell_and_a_slurm_batch_script_are_no_rank():
    assert Ranks.detect({}) is None
    assert Ranks.detect({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None


def test_what_is_missing_is_named():
    with pytest.raises(LaunchError, match=r"started by torchrun, but LOCAL_RANK is '' where a number"):
        Ranks.detect({"RANK": "0", "WORLD_SIZE": "2"})


def test_the_meeting_place_of_a_slurm_step_is_its_first_host_and_a_port_of_its_job():
    assert rendezvous_address(Ranks.detect(SRUN), SRUN) == ("node7", 23456)


def test_master_addr_and_port_win():
    given = {**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert rendezvous_address(Ranks.detect(given), given) == ("10.0.0.1", 1234)


def test_torchrun_without_a_meeting_place_is_refused():
    with pytest.raises(LaunchError, match="MASTER_ADDR"):
        rendezvous_address(Ranks.detect(TORCHRUN), TORCHRUN)


def test_an_agent_of_torchrun_has_one_name_in_all_its_attempts():
    """Its run id may be that of another launch: "none" where the user has set none."""

    def name(logs, attempt=0, rank=0):
        error = f"{logs}/attempt_{attempt}/{rank}/error.json" if logs else ""
        return agent_name({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": error})

    assert name("/tmp/a/none_1") == name("/tmp/a/none_1", attempt=1, rank=3) != name("/tmp/a/none_2")
    assert name("") == name("", attempt=1) != name("/tmp/a/none_1")
    assert agent_name({}) is None


@pytest.mark.parametrize(
    ("nproc", "nnodes", "fits"),
    [
        *[(None, None, True), (4, None, True), (8, None, True), (4, 2, True), (None, 2, True), (8, 1, True)],
        *[(2, None, False), (8, 2, False), (None, 4, False), (1, None, False), (None, 8, False)],
    ],
)
def test_sizes_that_are_not_those_of_the_launcher_are_refused(nproc, nnodes, fits):
    """A shell that a launcher's variables were left in trained on their ranks, without a word."""
    for environment in (TORCHRUN, SRUN):
        ranks = Ranks.detect(environment)
        if fits:
            ranks.check_sizes(nproc, nnodes)
        else:
            with pytest.raises(LaunchError, match=f"is rank 5 of 8 that {ranks.launcher} has started"):
                ranks.check_sizes(nproc, nnodes)


def test_a_recipe_with_another_number_of_ranks_than_the_launcher_is_told():
    """A shell that a launcher's variables were left in trained a recipe of four ranks on one."""
    for environment in (TORCHRUN, SRUN):
        ranks = Ranks.detect(environment)
        assert (
            ranks.compare(None) is ranks.compare((8, "my.toml:3")) is ranks.compare((8, "--set #1")) is None
        )
        note = ranks.compare((4, "my.toml:3"), environment)
        assert note.startswith(
            "my.toml:3: run.ranks is 4, and by its environment this process is rank 5 of 8"
        )
        assert (
            f"the run has 8. If an earlier launcher left this here: unset {next(iter(environment))}" in note
        )
        with pytest.raises(LaunchError, match=r"--set #1: run\.ranks is 4, and by its environment"):
            ranks.compare((4, "--set #1"), environment)
    assert Ranks(world_size=2).compare((4, "my.toml:3")) is None  # our own launcher: --nproc


def test_ranks_share_the_cores_of_a_host():
    alone, shared = Ranks(), Ranks(local_world_size=10_000)
    assert alone.threads() >= shared.threads() == 1


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", 64), ("650000 100000", 6), ("50000 100000", 1), ("9900000 100000", 64)],
)
def test_a_container_s_quota_of_cpu_time_bounds_what_its_processes_use(tmp_path, monkeypatch, quota, threads):
    monkeypatch.setattr(host_processors, "allowed_processors", lambda: frozenset(range(64)))
    group = tmp_path / "sys/fs/cgroup/pod"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod\n")
    (group / "cpu.max").write_text(quota)
    assert host_processors.usable_processors(tmp_path) == threads


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"RANK": "8"}, "RANK is 8 and WORLD_SIZE 8: ranks are numbered from 0"),
        ({"WORLD_SIZE": "0"}, "RANK is 5 and WORLD_SIZE 0"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK is 4 and LOCAL_WORLD_SIZE 4"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' where a number was expected"),
        ({"RANK": "-1"}, "RANK is '-1' where a number was expected"),
    ],
)
def test_numbers_that_make_no_rank_are_refused(changes, text):
    """A rank beyond the world waited for one that never comes."""
    with pytest.raises(LaunchError, match=f"^started by torchrun, but {text}"):
        Ranks.detect({**TORCHRUN, **changes})


def test_nodes_of_slurm_may_have_different_numbers_of_tasks():
    environment = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1,7", "SLURM_LOCALID": "6"}
    assert Ranks.detect(environment).local_rank == 6


@pytest.mark.parametrize("port", ["http", "", "0", "70000"])
def test_a_port_that_is_none_is_refused(port):
    """It ended with a traceback."""
    with pytest.raises(LaunchError, match=f"^MASTER_PORT is '{port}': expected 1 to 65535$"):
        rendezvous_address(Ranks(launcher="torchrun"), {"MASTER_ADDR": "a", "MASTER_PORT": port})


def test_a_pod_of_a_pytorchjob_starts_its_ranks_where_the_endpoint_is_given():
    """It has rank and size of the pods, and the error named no remedy."""
    pod = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    assert Ranks.joined("job-master-0:29400", pod) is None
    with pytest.raises(
        LaunchError, match=r"^started by torchrun, but LOCAL_RANK is ''.* PyTorchJob, give --nnodes"
    ):
        Ranks.joined(environment=pod)


def test_a_requeued_job_of_slurm_has_another_name():
    """Ranks met the store of the attempt before, which was still ending."""
    first, again = (run_name(Ranks.detect(SRUN), {**SRUN, "SLURM_RESTART_COUNT": n}) for n in "01")
    assert first != again


LEFT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize("endpoint", ["", "node1:29400"])
def test_variables_left_in_the_shell_are_warned_of_in_tasks_of_srun(endpoint, capsys):
    """Each of the tasks may be rank 0 of 1, or a run of its own in a sweep, which had been refused."""
    for number in "01":
        found = Ranks.joined(endpoint, {**SRUN, **LEFT, "SLURM_PROCID": number})
        assert found == Ranks(0, 1, 0, 1, "torchrun")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nanotrain: warning: by its environment this process is rank 0 of 1")
    assert line.endswith(
        f"one of 8 tasks of srun. If an earlier launcher left this here: unset {' '.join(LEFT)}"
    )


def test_a_recipe_of_several_ranks_is_refused_where_each_task_of_srun_is_the_only_one():
    """Each of the tasks was rank 0 of 1, and trained alone."""
    both = {**SRUN, **LEFT}
    text = f"and one of 8 tasks of srun; start the ranks with srun after: unset {' '.join(LEFT)}; "
    with pytest.raises(LaunchError, match=f"is rank 0 of 1 that torchrun has started, {text}"):
        Ranks.detect(both).compare((8, "my.toml:3"), both)
    assert Ranks.detect(both).compare((1, "--set #1"), both) is None


def test_an_elastic_torchrun_has_the_ranks_that_it_has():
    """A note told its ranks to unset their variables, and --set run.ranks=N was refused after a host left."""
    elastic = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "a"}
    for where in ("my.toml:3", "--set #1"):
        assert Ranks.detect(elastic).compare((16, where), elastic) is None


def test_tasks_of_srun_may_start_the_ranks_of_their_hosts(capsys):
    for more in (
        {"SLURM_STEP_NUM_TASKS": "2"},
        {"WORLD_SIZE": "28", "LOCAL_WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "4"},  # the last host has 4
        {"TORCHELASTIC_RUN_ID": "a", "SLURM_STEP_NUM_TASKS": "3"},
        {},
    ):
        environment = {**SRUN, **TORCHRUN, **more}
        assert Ranks.joined(environment=environment) == Ranks.detect({**TORCHRUN, **more})
    assert not capsys.readouterr().err


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


DAEMON = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize("given", [OPEN_MPI, MPICH, {"MPI_LOCALNRANKS": "2"}, {**DAEMON, **OPEN_MPI}])
def test_processes_of_mpirun_are_refused(given):
    """Each of them trained alone, and ended with code 0."""
    sizes = " ".join(name for name in given if name in MPI_SIZES)
    text = rf"each process runs alone; use srun or torchrun, .*--nnodes.*independent runs, .*: unset {sizes}$"
    with pytest.raises(LaunchError, match=text):
        Ranks.joined(environment=given)
    assert Ranks.joined("node1:29400", given) is None


def test_mpirun_may_start_what_says_by_itself_which_rank_it_is():
    assert Ranks.joined(environment={**OPEN_MPI, **TORCHRUN}) == Ranks.detect(TORCHRUN)
    for size in ("8", "12"):  # of all components of a heterogeneous job
        assert Ranks.joined(environment={**SRUN, "PMI_SIZE": size}) == Ranks.detect(SRUN)
    assert Ranks.joined(environment={**MPICH, "WORLD_SIZE": "1"}) is None
    assert Ranks.joined(environment={"OMPI_COMM_WORLD_SIZE": "1"}) is None
