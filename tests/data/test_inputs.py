import os
import sysconfig
from pathlib import Path

import pytest

from jaxpar.config import InputError
from jaxpar.data import inputs
from jaxpar.data.inputs import expand


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep/a.md", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def names(folder, paths):
    return [str(path.relative_to(folder)) for path in paths]


def test_given_order_stays_and_globs_are_sorted(folder):
    assert names(folder, expand([f"{folder}/sub/c.txt", f"{folder}/*.txt"], "x")) == ["sub/c.txt", "a.txt", "b.txt"]
    assert names(folder, expand([f"{folder}/**/*.*"], "x")) == ["a.txt", "b.txt", "sub/c.txt", "sub/deep/a.md"]


def test_no_file_comes_twice(folder):
    assert names(folder, expand([f"{folder}/b.txt", f"{folder}/*.txt", f"{folder}/b.txt"], "x")) == ["b.txt", "a.txt"]


def test_result_does_not_depend_on_the_listing(folder, monkeypatch):
    expected = expand([f"{folder}/**/*.*"], "x")
    real = inputs.glob.glob
    monkeypatch.setattr(inputs.glob, "glob", lambda *args, **kwargs: sorted(real(*args, **kwargs), reverse=True))
    assert expand([f"{folder}/**/*.*"], "x") == expected


def test_stdlib_and_home(folder, monkeypatch):
    assert expand(["{stdlib}/json/decoder.py"], "x") == [Path(sysconfig.get_path("stdlib")) / "json/decoder.py"]
    monkeypatch.setenv("HOME", str(folder))
    assert names(folder, expand(["~/a.txt"], "x")) == ["a.txt"]


def test_name_with_brackets_is_a_name_first(folder):
    (folder / "notes[1].txt").write_text("x")
    assert names(folder, expand([f"{folder}/notes[1].txt"], "x")) == ["notes[1].txt"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{}/a.tx", r"^data.train: there is no file {}/a.tx. Did you mean {}/a.txt\?$"),
        ("{}/zzz", r"^data.train: there is no file {}/zzz.$"),
        ("{}/no/a.txt", r"^data.train: there is no file {}/no/a.txt: the folder {}/no does not exist.$"),
        ("{}/*.csv", r"^data.train: the glob {}/\*.csv matches no file. `\*\*` is needed to look into sub-folders.$"),
        ("{}/su*", r"^data.train: the glob {}/su\* matches no file."),  # only a folder matches
        ("{}/sub", r"^data.train: {}/sub is a folder. Name its files with a glob, like {}/sub/\*\*/\*.txt.$"),
    ],
)
def test_what_is_not_there(folder, given, message):
    with pytest.raises(InputError, match=message.replace("{}", str(folder))):
        expand([given.replace("{}", str(folder))], "data.train")


def test_message_shows_what_a_placeholder_stood_for(folder):
    with pytest.raises(
        InputError, match=rf"{{stdlib}}/jsn.py \(that is {sysconfig.get_path('stdlib')}{os.sep}jsn.py\)"
    ):
        expand(["{stdlib}/jsn.py"], "data.train")
