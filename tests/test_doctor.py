"""``nanotrain doctor`` with real ranks: its own, and those that torchrun or srun started."""

import json

import pytest
from command import begin, nanotrain
from test_join import free_port, srun, torchrun


def findings(out):
    return {each["check"]: each for each in json.loads(out)["findings"]}


@pytest.mark.full
def test_its_own_ranks_measure_and_agree(tmp_path):
    done = nanotrain("doctor", "--ranks", "2", "--json", cwd=tmp_path)
    found = findings(done.out)
    assert done.err == ""
    assert found["all-reduce"]["status"] == "note"  # right, and nothing to hold a CPU's speed against
    assert found["all-reduce"]["text"].startswith("right on all 2 ranks")
    ranks = json.loads(done.out)["ranks"]
    assert [each["rank"] for each in ranks] == [0, 1]
    assert all(each["all_reduce"]["wrong"] == 0 and each["gemm_bfloat16"] > 0 for each in ranks)


@pytest.mark.parametrize("launcher", [torchrun, pytest.param(srun, marks=pytest.mark.full)])
def test_ranks_that_others_started_join_and_rank_0_tells_for_all(tmp_path, monkeypatch, launcher):
    port, started = free_port(), []
    for rank in range(2):
        for name, value in launcher(rank, port).items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("OMP_NUM_THREADS", "none")  # bad: rank 0 tells it, all end so
        started.append(begin("doctor", "--quick", "--json", cwd=tmp_path))
    zero, one = (each.end() for each in started)
    assert (zero.code, one.code) == (1, 1)
    assert (zero.err, one.out, one.err) == ("", "", "")
    assert findings(zero.out)["OMP_NUM_THREADS"]["status"] == "bad"
    assert [each["rank"] for each in json.loads(zero.out)["ranks"]] == [0, 1]
