"""Each check of a host finds the fault that was planted, says what to do, and is content without it."""

import errno
import os
import resource
import types

import pytest
from nanotrain_doctor.clock import ClockWatch, clock_source, judge_offsets
from nanotrain_doctor.container import examine_memory, examine_quota
from nanotrain_doctor.limits import examine_load, locked_memory, open_files, processes
from nanotrain_doctor.network import examine_endpoint, host_name, local_ports, port_range
from nanotrain_doctor.shared_memory import examine_shared_memory, litter
from nanotrain_doctor.software import examine_plugins, examine_torch, torch_version
from nanotrain_doctor.storage import examine_disk, free_space, judge_speed, kind
from nanotrain_doctor.variables import examine_variables

NONE = resource.RLIM_INFINITY
GIB = 2**30


def tree(root, **files):
    """Write files below ``root``; ``__`` in a name stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def limited(soft, hard=NONE):
    return lambda which: (soft, hard)


def space(free, total=100 * GIB, files=10**6):
    room = {"f_frsize": 1, "f_bavail": free, "f_blocks": total, "f_favail": files, "f_files": 10**7}
    return lambda path: types.SimpleNamespace(**room)


@pytest.mark.parametrize(
    ("soft", "hard", "status", "remedy"),
    [
        (256, 1024, "bad", "limits.conf"),
        (1024, 524288, "warning", "ulimit -n 65536"),
        (1024, 8192, "warning", "ulimit -n 8192"),
        (65536, 65536, "good", ""),
        (NONE, NONE, "good", ""),
    ],
)
def test_open_files(soft, hard, status, remedy):
    found = open_files(limited(soft, hard))
    assert (found.status, remedy in found.remedy) == (status, True)


def test_locked_memory_matters_where_there_is_an_rdma_card(tmp_path):
    assert locked_memory(tmp_path, limited(2**23)).status == "good"
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    found = locked_memory(tmp_path, limited(2**23))
    assert found.status == "bad"
    assert "mlx5_0" in found.text
    assert "memlock" in found.remedy
    assert locked_memory(tmp_path, limited(NONE)).status == "good"


def test_processes_are_those_of_user_and_container(tmp_path):
    assert processes(tmp_path, limited(NONE)).status == "good"
    assert processes(tmp_path, limited(300)).status == "bad"
    tree(tmp_path, sys__fs__cgroup__pids__max="1000").joinpath("sys/fs/cgroup/pids/max").rename(
        tmp_path / "sys/fs/cgroup/pids.max"
    )
    found = processes(tmp_path, limited(NONE))
    assert found.status == "warning"
    assert found.values["container"] == 1000


MEMINFO = "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: {} kB\n"


def test_memory_is_what_the_control_group_leaves(tmp_path):
    tree(tmp_path, proc__meminfo=MEMINFO.format(60 * 2**20), proc__self__cgroup="0::/job/step\n")
    assert examine_memory(tmp_path).status == "good"
    tree(tmp_path, **{"sys__fs__cgroup__job__memory.max": str(8 * GIB)})
    tree(tmp_path, **{"sys__fs__cgroup__job__memory.current": str(8 * GIB - 2**29)})
    tree(tmp_path, **{"sys__fs__cgroup__job__step__memory.max": "max"})
    found = examine_memory(tmp_path)
    assert found.status == "bad"
    assert (found.values["limit"], found.values["used_of_limit"]) == (8 * GIB, 8 * GIB - 2**29)
    assert (
        examine_memory(tree(tmp_path / "other", proc__meminfo=MEMINFO.format(5 * 2**20))).status == "warning"
    )


def test_memory_of_control_groups_of_version_1(tmp_path):
    tree(tmp_path, proc__meminfo=MEMINFO.format(60 * 2**20), proc__self__cgroup="3:memory:/docker/a\n")
    group = "sys__fs__cgroup__memory__docker__a__memory."
    tree(tmp_path, **{group + "limit_in_bytes": str(2**62)})
    assert examine_memory(tmp_path).values["limit"] is None
    tree(tmp_path, **{group + "limit_in_bytes": str(4 * GIB), group + "usage_in_bytes": str(GIB)})
    assert examine_memory(tmp_path).values["limit"] == 4 * GIB


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/a/b\n", {"a__cpu.max": "200000 100000", "a__b__cpu.max": "max 100000"}, 2.0),
        (
            "2:cpu,cpuacct:/a\n",
            {"cpu__a__cpu.cfs_quota_us": "150000", "cpu__a__cpu.cfs_period_us": "100000"},
            1.5,
        ),
        (
            "2:cpu,cpuacct:/a\n",
            {"cpu__a__cpu.cfs_quota_us": "-1", "cpu__a__cpu.cfs_period_us": "100000"},
            None,
        ),
        ("0::/\n", {}, None),
    ],
)
def test_cpu_quota(tmp_path, groups, files, quota):
    tree(tmp_path, proc__self__cgroup=groups)
    tree(tmp_path, **{f"sys__fs__cgroup__{name}": text for name, text in files.items()})
    found = examine_quota(tmp_path, cores=64)
    assert found.values["quota"] == quota
    assert found.status == ("good" if quota is None else "warning")
    assert examine_quota(tmp_path, cores=1).status == "good"


def test_load():
    assert examine_load(9.0, 8).status == "warning"
    assert examine_load(0.5, 8).status == "note"


@pytest.mark.parametrize(
    ("total", "free", "status"),
    [
        (64 * 2**20, 64 * 2**20, "bad"),
        (16 * GIB, 2**20, "bad"),
        (2 * GIB, GIB // 2, "warning"),
        (16 * GIB, 8 * GIB, "good"),
    ],
)
def test_shared_memory(tmp_path, total, free, status):
    (tmp_path / "dev/shm").mkdir(parents=True)
    found, _ = examine_shared_memory(tmp_path, space(free, total))
    assert found.status == status


def test_no_shared_memory_at_all(tmp_path):
    (found,) = examine_shared_memory(tmp_path)
    assert (found.status, "mount" in found.remedy) == ("bad", True)


def test_litter_is_what_no_process_has(tmp_path):
    shm = tmp_path / "dev/shm"
    for name in (
        "nccl-dead",
        "nanotrain-shared-x",
        "nccl-mapped",
        "torch_open",
        "somebody-elses",
        "nccl-new",
    ):
        tree(shm, **{name: "x"})
        os.truncate(shm / name, 0)
        with open(shm / name, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 65 * 2**20 if name == "nccl-dead" else 4096)
        os.utime(shm / name, (1, 1) if name != "nccl-new" else None)
    tree(tmp_path, proc__7__maps="7f0-7f1 rw-s 0 00:01 5 /dev/shm/nccl-mapped\n")
    (tmp_path / "proc/7/fd").mkdir()
    (tmp_path / "proc/7/fd/3").symlink_to("/dev/shm/torch_open")
    found = litter(tmp_path)
    assert found.status == "warning"
    assert list(found.values["files"]) == ["nanotrain-shared-x", "nccl-dead"]
    assert litter(tmp_path, user=os.getuid() + 1).status == "good"


def test_disk_that_is_slow_full_or_small(tmp_path):
    assert judge_speed(20e6, 1e9, 0.01).status == "warning"
    assert judge_speed(2e9, 1e9, 0.01).status == "good"
    assert free_space(tmp_path, space(GIB // 2)).status == "bad"
    assert free_space(tmp_path, space(5 * GIB)).status == "warning"
    assert free_space(tmp_path, space(50 * GIB, files=10)).status == "bad"
    assert free_space(tmp_path, space(50 * GIB)).status == "good"

    def full(file, block):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    found = {each.check: each for each in examine_disk(tmp_path / "runs", megabytes=1, write=full)}
    assert found["disk"].status == "bad"
    assert "quota" in found["disk"].remedy


def test_a_disk_that_returns_other_bytes_is_found(tmp_path):
    def flips(file, block):
        return os.write(file, bytes([block[0] ^ 1]) + block[1:])

    found = {each.check: each for each in examine_disk(tmp_path, megabytes=1, write=flips)}
    assert found["disk"].status == "bad"
    assert "not what was written" in found["disk"].text


def test_a_file_where_runs_would_be_is_told(tmp_path):
    (tmp_path / "runs").write_text("")
    for folder in (tmp_path / "runs", tmp_path / "runs" / "a"):
        found = {each.check: each for each in examine_disk(folder, megabytes=1)}
        assert found["disk"].status == "bad"
        assert found["disk"].text == f"{tmp_path / 'runs'} cannot be written: Not a directory"


def test_a_folder_that_cannot_be_written_is_told_and_nothing_is_left(tmp_path, monkeypatch):
    before = set(tmp_path.iterdir())
    found = {each.check: each for each in examine_disk(tmp_path / "a/b", megabytes=1)}
    assert found["disk"].status in ("good", "warning")
    assert set(tmp_path.iterdir()) == before

    def read_only(**options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    found = {each.check: each for each in examine_disk(tmp_path, megabytes=1)}
    assert found["disk"].status == "bad"
    assert "Read-only" in found["disk"].text


def test_file_systems_that_do_not_outlive_the_machine(tmp_path):
    mounts = "/dev/a / ext4 rw 0 0\ntmpfs /scratch tmpfs rw 0 0\nnas:/x /data nfs4 rw 0 0\n"
    tree(tmp_path, proc__self__mounts=mounts)
    where = {path: kind(type(tmp_path)(path), tmp_path) for path in ("/scratch/run", "/data/run", "/home")}
    assert [found.status for found in where.values()] == ["warning", "note", "note"]
    assert [found.values["type"] for found in where.values()] == ["tmpfs", "nfs4", "ext4"]


def test_clocks_that_jump_or_cannot_be_true():
    now = 1.9e9
    times = iter([now, now + 61])
    watch = ClockWatch(wall=lambda: next(times), monotonic=iter([0.0, 1.0]).__next__)
    found = watch.finding()
    assert found.status == "warning"
    assert found.values["wall_minus_monotonic"] == pytest.approx(60)
    assert ClockWatch(wall=lambda: 0.0, monotonic=lambda: 0.0).finding().status == "bad"
    assert ClockWatch(wall=lambda: now, monotonic=lambda: 5.0).finding().status == "good"


def test_clock_source(tmp_path):
    path = "sys__devices__system__clocksource__clocksource0__current_clocksource"
    assert clock_source(tmp_path).status == "note"
    assert clock_source(tree(tmp_path, **{path: "hpet\n"})).status == "warning"
    assert clock_source(tree(tmp_path, **{path: "tsc\n"})).status == "good"


def test_clocks_of_hosts_that_are_apart():
    assert judge_offsets({"b": (0.01, 0.001), "c": (-0.2, 0.1)}).status == "good"
    assert judge_offsets({"b": (1.5, 0.9)}).status == "good"  # it may be less than a second
    found = judge_offsets({"b": (0.01, 0.001), "c": (-7.5, 0.1)})
    assert found.status == "warning"
    assert "c is -7.500 s" in found.text


def nobody(address, port):
    raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")


def free(address, port):
    return None


@pytest.mark.parametrize(
    ("addresses", "bind", "told"),
    [
        (["127.0.1.1"], free, "which every host is to itself"),
        (["::1", "127.0.0.1"], free, "which every host is to itself"),
        (["10.0.0.9"], nobody, "10.0.0.9 is no address of this host"),
    ],
)
def test_a_host_name_that_leads_nowhere(addresses, bind, told):
    for hosts, status in ((1, "warning"), (2, "bad")):
        found = host_name("node7", hosts=hosts, resolve=lambda name: addresses, bind=bind)
        assert found.status == status
        assert told in found.text
        assert "/etc/hosts" in found.remedy


def test_a_host_name_without_an_address_and_a_good_one():
    def unknown(name):
        raise OSError(-2, "Name or service not known")

    assert host_name("node7", hosts=2, resolve=unknown).status == "bad"
    assert host_name("node7", hosts=2, resolve=lambda name: ["10.0.0.9"], bind=free).status == "good"


def test_ports_and_loopback(tmp_path):
    assert local_ports().status == "good"
    assert local_ports(interface=lambda: None).status == "bad"
    assert local_ports(bind=nobody, interface=lambda: "lo").status == "bad"
    name = "proc__sys__net__ipv4__ip_local_port_range"
    assert port_range(tree(tmp_path, **{name: "32768\t33000\n"})).status == "warning"
    assert port_range(tree(tmp_path, **{name: "32768\t60999\n"})).status == "good"


def test_an_endpoint_whose_port_is_taken():
    def taken(address, port):
        if port:
            raise OSError(errno.EADDRINUSE, "Address already in use")

    def known(name):
        return ["10.0.0.1"]

    assert examine_endpoint("node1:29400", resolve=known, bind=taken).status == "bad"
    assert examine_endpoint("node1:29400", resolve=known, bind=free).status == "good"
    assert examine_endpoint("node1:29400", resolve=known, bind=nobody).status == "note"


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "warning"),
        ({"NCCL_P2P_DISABLE": "1"}, "warning"),
        ({"NCCL_DEBUG": "INFO"}, "warning"),
        ({"NCCL_PROTO": "LL128"}, "warning"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "warning"),
        ({"OMP_NUM_THREADS": "8"}, "warning"),
        ({"OMP_NUM_THREADS": "many"}, "bad"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, "warning"),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "bad"),
        ({"NCCL_SOCKET_IFNAME": "=lo"}, "bad"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "warning"),
    ],
)
def test_variables_that_hurt(environment, status):
    (found,) = examine_variables(environment, cores=8, ranks=4, hosts=2, gpus=True, known=["lo", "eth0"])
    assert (found.check, found.status) == (next(iter(environment)), status)
    assert found.remedy


def test_variables_that_do_not_hurt():
    content = {
        "CUDA_LAUNCH_BLOCKING": "0",
        "NCCL_DEBUG": "WARN",
        "OMP_NUM_THREADS": "2",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "NCCL_SOCKET_IFNAME": "^docker",
        "GLOO_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    (found,) = examine_variables(content, cores=8, ranks=4, hosts=2, gpus=True, known=["lo", "eth0"])
    assert found.status == "good"


def test_a_torch_that_the_core_does_not_work_with():
    assert torch_version("2.5.1", ["torch>=2.11,<2.15"]).status == "bad"
    assert torch_version("2.13.0+cu130", ["torch>=2.11,<2.15"]).status == "good"

    def broken(name):
        raise ImportError("libcudart.so.13: cannot open shared object file")

    (found,) = examine_torch(broken)
    assert found.status == "bad"
    assert "libcudart" in found.text


def fake_torch(*, gpus=0, cuda="13.0", nccl=True, names=None):
    names = names or ["NVIDIA H200"] * gpus
    devices = types.SimpleNamespace(
        is_available=lambda: gpus > 0,
        device_count=lambda: gpus,
        get_device_name=names.__getitem__,
        nccl=types.SimpleNamespace(version=lambda: (2, 28, 3)),
    )
    distributed = types.SimpleNamespace(
        is_available=lambda: True, is_gloo_available=lambda: True, is_nccl_available=lambda: nccl
    )
    version = types.SimpleNamespace(cuda=cuda)
    return types.SimpleNamespace(cuda=devices, distributed=distributed, version=version, __version__="2.13.0")


@pytest.mark.parametrize(
    ("torch", "environment", "remedy"),
    [
        (fake_torch(cuda=None), {}, "a torch with CUDA"),
        (fake_torch(), {"CUDA_VISIBLE_DEVICES": ""}, "unset CUDA_VISIBLE_DEVICES"),
        (fake_torch(), {}, "a driver for CUDA 13.0"),
    ],
)
def test_a_driver_whose_gpus_torch_does_not_see(tmp_path, torch, environment, remedy):
    assert examine_torch(lambda name: torch, tmp_path, environment)[0].status == "note"
    tree(
        tmp_path, proc__driver__nvidia__version="NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  x"
    )
    found = examine_torch(lambda name: torch, tmp_path, environment)[0]
    assert found.status == "bad"
    assert "580.82.07" in found.text
    assert remedy in found.remedy


def test_gpus_that_differ_and_a_torch_without_nccl(tmp_path):
    mixed = fake_torch(gpus=2, names=["NVIDIA H100", "NVIDIA A100"])
    assert [each.status for each in examine_torch(lambda name: mixed, tmp_path)] == ["warning", "good"]
    bare = fake_torch(gpus=2, nccl=False)
    assert [each.status for each in examine_torch(lambda name: bare, tmp_path)] == ["good", "bad"]


def test_plugins_that_do_not_load():
    broken = types.SimpleNamespace(error="ImportError: no module named flash")
    registry = types.SimpleNamespace(
        plugins=(broken,), broken=(broken,), clashes=lambda: ("two of 'x'",), versions=lambda: {}
    )
    first, second, _ = examine_plugins(registry)
    assert (first.status, second.status) == ("bad", "bad")
    assert "no module named flash" in first.text
