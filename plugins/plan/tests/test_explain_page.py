"""Where ``nanotrain explain`` writes a page, and where it refuses to."""

import argparse
import os
from pathlib import Path

import pytest
from explained import TINY
from nanotrain_plan.rendering.file import check_page, write_page

from nanotrain_core.api import NanotrainError
from nanotrain_core.cli import main


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


@pytest.mark.parametrize("command", ["explain", "plan", "inspect"])
def test_no_page_takes_the_place_of_the_recipe(command, recipe, capsys):
    if command == "inspect":
        pytest.importorskip("nanotrain_inspect")
    assert main([command, recipe, "--html", recipe]) == 2
    told = f"nanotrain: --html {recipe}: this is the recipe, which would be lost\n"
    assert capsys.readouterr().err == told
    assert Path(recipe).read_text() == TINY


@pytest.mark.parametrize("command", ["explain", "plan", "inspect"])
def test_no_page_takes_the_place_of_a_pipe(command, recipe, tmp_path, capsys):
    if command == "inspect":
        pytest.importorskip("nanotrain_inspect")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main([command, recipe, "--html", str(pipe)]) == 2
    told = f"nanotrain: --html {pipe}: expected a file, this is a device, pipe or socket\n"
    assert capsys.readouterr().err == told
    assert pipe.is_fifo()


def test_a_page_is_written_through_a_symbolic_link(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "page.html", tmp_path / "page.html"
    target.write_text("old")
    link.symlink_to("there/page.html")
    args = argparse.Namespace(html=str(link), recipe="laptop")
    check_page(args)
    write_page(args, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_page_behind_a_link_into_a_missing_folder_is_refused(tmp_path):
    link = tmp_path / "page.html"
    link.symlink_to("none/page.html")
    with pytest.raises(NanotrainError, match=r"there is no folder .*none"):
        check_page(argparse.Namespace(html=str(link), recipe="laptop"))


@pytest.mark.parametrize("command", ["explain", "plan", "inspect"])
def test_a_page_in_a_missing_folder_is_refused_at_once(command, recipe, tmp_path, capsys):
    if command == "inspect":
        pytest.importorskip("nanotrain_inspect")  # this plugin only extends that command
    assert main([command, recipe, "--html", str(tmp_path / "none" / "x.html")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"nanotrain: --html {tmp_path / 'none' / 'x.html'}: there is no folder {tmp_path / 'none'}"
    ]
