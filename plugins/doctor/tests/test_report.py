"""``nanotrain doctor`` as a user calls it, and what its JSON must not have."""

import json
import os
import stat
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nanotrain_doctor.findings import bad
from nanotrain_doctor.redact import environment_to_tell, redacted
from nanotrain_doctor.show import to_json

from nanotrain_core.cli import main

SECRETS = [
    "hf_abcdefghijABCDEFGHIJ0123456789",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "sk-proj-0123456789abcdef",
    "0123456789abcdef0123456789abcdef01234567",
    "AKIA0123456789ABCDEF",
]


@settings(deadline=None)
@given(
    st.sampled_from(SECRETS),
    st.sampled_from(["{}", "pip failed: {} refused", "x={}", "'{}'", "https://{}@host/x"]),
)
def test_keys_are_hidden_wherever_they_stand(secret, text):
    shown = json.dumps(redacted({"a": [text.format(secret)], "b": {"c": text.format(secret)}}))
    assert secret not in shown
    assert "(hidden)" in shown


def test_users_passwords_and_homes_are_hidden_and_the_rest_stays():
    text = "https://jane:pw@pypi.corp/simple?token=abc at /home/jane/run, /data/jane/x and /home/janet"
    shown = redacted(text, home="/home/jane", user="jane")
    hidden = "https://(hidden)@pypi.corp/simple?token=(hidden) at ~/run, /data/(user)/x and /home/janet"
    assert shown == hidden
    plain = {"version": "2.13.0+cu130", "path": "/usr/lib", "bytes": 5, "none": None, "nccl": "2.28.3"}
    assert redacted(plain, home="/home/jane", user="jane") == plain


def test_of_the_environment_only_what_concerns_a_run_is_told():
    told = environment_to_tell(
        {"NCCL_DEBUG": "INFO", "HOME": "/x", "AWS_PROFILE": "prod", "TORCH_API_KEY": "k", "RANK": "0"}
    )
    assert told == {"NCCL_DEBUG": "INFO", "RANK": "0", "TORCH_API_KEY": "(hidden)"}


def test_more_ranks_than_a_machine_can_start_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("nanotrain_doctor.command.usable_processors", lambda: 2)
    monkeypatch.setattr("nanotrain_doctor.command.measure_here", lambda count: pytest.fail("started"))
    assert main(["doctor", "--ranks", "33"]) == 2
    told = "nanotrain: --ranks 33: expected at most 32, 16 for each processor that may be used here (2)\n"
    assert capsys.readouterr().err == told


def test_json_of_a_whole_report_holds_no_planted_secret(monkeypatch):
    monkeypatch.setenv("NCCL_NET", SECRETS[0])
    monkeypatch.setenv("TORCH_TOKEN", "swordfish")
    found = [bad("plugin", f"cannot reach https://me:{SECRETS[1]}@host", "mend", trace=[SECRETS[2]])]
    text = to_json(found, ranks=[{"failed": SECRETS[3]}])
    assert not [secret for secret in (*SECRETS[:4], "swordfish") if secret in text]
    table = json.loads(text)
    assert table["exit_code"] == 1
    assert table["findings"][0]["check"] == "plugin"


def doctor(capsys, *words):
    code = main(["doctor", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_quick_looks_at_every_side_of_a_host(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    code, out, err = doctor(capsys, "--quick", "--json")
    table = json.loads(out)
    found = {each["check"]: each for each in table["findings"]}
    sides = ["Python", "torch", "plugins", "GPUs", "backends", "load", "disk", "clock", "loopback", "ports"]
    sides += ["open files", "locked memory", "processes", "host memory", "CPU quota", "/dev/shm", "host name"]
    assert not set(sides) - found.keys()
    assert all(each["remedy"] for each in found.values() if each["status"] in ("warning", "bad"))
    assert code == table["exit_code"] == int(any(each["status"] == "bad" for each in found.values()))
    assert err == ""
    assert list(tmp_path.iterdir()) == []  # it leaves nothing


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(stat.S_IREAD | stat.S_IEXEC)
    code, out, _ = doctor(capsys, "--quick")
    tmp_path.chmod(stat.S_IRWXU)
    assert code == 1
    assert "cannot be written" in out


def test_what_another_launcher_left_in_the_shell_is_told(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    code, out, _ = doctor(capsys, "--quick")
    assert code == 1
    assert "WORLD_SIZE is 'two'" in out
    assert "unset what another launcher left" in out


def test_a_torch_that_does_not_import_is_told_and_no_rank_is_started(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("nanotrain_doctor.command.prepare", lambda: None)
    code, out, _ = doctor(capsys, "--json")
    found = {each["check"]: each for each in json.loads(out)["findings"]}
    assert (code, found["torch"]["status"]) == (1, "bad")
    assert "does not import" in found["torch"]["text"]
    assert json.loads(out)["ranks"] == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--hardware", "h2000"], "no hardware is named 'h2000'"),
        (["--ranks", "0"], "expected a whole number above 0"),
        (["--rdzv-endpoint", "localhost"], "expected HOST:PORT, got 'localhost'"),
        (["--fast"], "unknown option '--fast'"),
    ],
)
def test_mistakes_are_told_in_a_line(words, told, capsys):
    try:
        code = main(["doctor", *words, "--quick"])
    except SystemExit as end:  # of argparse
        code = end.code
    assert told in capsys.readouterr().err
    assert code == 2


@pytest.mark.full
@pytest.mark.parametrize(("threads", "code"), [pytest.param("1", 7, marks=pytest.mark.full), ("0", 1)])
def test_a_command_follows_if_the_host_is_fit(tmp_path, threads, code):
    """Its words are not the doctor's, though they look like them; its exit code is the caller's."""
    word = "import sys; print('ran', sys.argv[1:]); sys.exit(7)"
    words = ["doctor", "--quick", "--folder", str(tmp_path), "--then", sys.executable, "-c", word, "--json"]
    around = {**os.environ, "OMP_NUM_THREADS": threads}
    done = subprocess.run(
        [sys.executable, "-m", "nanotrain_core.cli", *words],
        env=around,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert ("ran ['--json']" in done.stdout) == (code == 7)
    assert ("expected a number above 0" in done.stdout) == (code == 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "--then: expected a command after it"),
        (("no-such-command",), "--then no-such-command: No such file"),
    ],
)
def test_a_command_that_is_none_is_told(words, told, tmp_path, capsys):
    assert main(["doctor", "--quick", "--folder", str(tmp_path), "--then", *words]) == 2
    assert told in capsys.readouterr().err
