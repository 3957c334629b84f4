"""What a recipe may say of a store, and ``nanotrain store``."""

import re

import fsspec
import pytest
from command import nanotrain
from nanotrain_object_store import problems_of
from small_runs import RECIPE, fit


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "names no place"),
        ("bucket/x", "names no place"),
        ("s3://", "names no place"),
        ("simplecache::s3://b/x", "names no place"),
        ("s4://bucket/x", "there is no file system 's4' .*did you mean 's3'"),
    ],
)
def test_urls_that_name_no_store_are_refused(url, said):
    ((key, text),) = problems_of(url)
    assert key == "url"
    assert re.search(said, text)


@pytest.mark.parametrize(
    "url", ["ftp://me:S3CRET@host/x", "sftp://:S3CRET@host/x", "simplecache::ftp://me:S3/CRET@h", "s3://k:@b"]
)
def test_a_password_is_refused_and_not_printed(url):
    ((key, text),) = problems_of(url)
    assert key == "url"
    assert "it has a password" in text
    assert "FTP_PASSWORD set" in text or url.startswith("s3:")
    assert "CRET" not in text


def test_what_only_resembles_a_password_is_none(monkeypatch):
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda protocol: None)
    for url in (
        *("sftp://me@host:22/x", "sftp://host:22/run@3", "abfs://in@account.example/x", "s3://b/a:b@c"),
        *("http://h:80?x=a@b", "github://org:repo@main/x"),
    ):
        assert [*problems_of(url)] == []


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    def missing(protocol):
        raise ImportError("Please install gcsfs")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    assert [*problems_of("gs://b/x")] == [("url", "gs:// needs a library: Please install gcsfs")]


def test_check_tells_where(tmp_path):
    recipe = tmp_path / "r.toml"
    text = RECIPE.format(
        name="small", steps=1, every=1, url="s4://b/x", more="", format="simple", keep_here=1
    )
    recipe.write_text(text)
    ended = nanotrain("check", str(recipe), cwd=tmp_path)
    assert ended.code == 2
    line = text.splitlines().index('url = "s4://b/x"') + 1
    assert f"r.toml:{line}: monitor.0.url: there is no file system 's4'" in ended.err


@pytest.mark.full
def test_the_command_lists_verifies_and_fetches(tmp_path):
    url = f"file://{tmp_path}/store"
    ran = fit(tmp_path / "one", url, steps=4)
    listed = nanotrain("store", "ls", url, cwd=tmp_path)
    assert (listed.code, [line.split()[0] for line in listed.out.splitlines()]) == (0, ["2", "4"])
    assert nanotrain("store", "verify", url, cwd=tmp_path).out.count("whole") == 2
    fetched = nanotrain("store", "fetch", url, "back", "--step", "2", cwd=tmp_path)
    assert fetched.code == 0, fetched.err
    name = "step-00000002.safetensors"
    assert (tmp_path / "back" / name).read_bytes() == (ran.folder / "checkpoints" / name).read_bytes()
    (path,) = (tmp_path / "store").glob("step-00000004-*/*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    damaged = nanotrain("store", "verify", url, cwd=tmp_path)
    assert damaged.code == 2
    assert "step-00000004" in damaged.err
    for words, said in (
        (("ls", url, "--step", "7"), "no such checkpoint; steps there: 2, 4"),
        (("ls", f"file://{tmp_path}/nothing"), "steps there: none"),
        (("fetch", url), "a folder is given to fetch"),
        (("ls", "x"), "names no place"),
    ):
        refused = nanotrain("store", *words, cwd=tmp_path)
        assert (refused.code, "Traceback" in refused.err) == (2, False)
        assert said in refused.err
