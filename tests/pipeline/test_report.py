"""What `jaxpar schedule` prints, and gives to programs."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from jaxpar.pipeline.check import check
from jaxpar.pipeline.report import run
from jaxpar.pipeline.schedules import Phase, Schedule


def test_json_is_the_whole_table(capsys):
    """A schedule put together from the JSON alone passes the checker."""
    run("1f1b", 4, 8, 2, None, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["bubble"] == pytest.approx(3 / 19) and said["live"] == [11, 9, 7, 5] and said["messages"] == 112
    phases = tuple(
        Phase("backward" not in p["phase"], "forward" not in p["phase"], p["start"], p["stop"]) for p in said["phases"]
    )
    values = {field.name: said[field.name] for field in fields(Schedule) if field.name != "phases"}
    tables = {name: np.array(value) if isinstance(value, list) else value for name, value in values.items()}
    assert check(Schedule(**tables, phases=phases)) == (11, 9, 7, 5)


def test_json_of_an_order(capsys):
    run("zb-h2", 3, 12, 1, None, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["bubble"] == pytest.approx(0) and said["live"] == [5, 5, 5] and said["runs"] is False
    assert said["orders"][2][:4] == [["F", 0, 0], ["B", 0, 0], ["F", 1, 0], ["B", 1, 0]]


def test_text(capsys, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    run("1f1b", 4, 8, 1, tmp_path / "a.svg", as_json=False)
    said = capsys.readouterr().out
    for words in (
        "1f1b: 4 stages, 8 microbatches\n",
        "14: 3 forward only, 8 both, 3 backward only",
        "27.27% of the time, (S - 1) / (v M + S - 1) = 3/11",
        "at most 7 5 3 1 chunk inputs",
        "7 on every stage, 1 for the model's output",
        "48: 24 activations, 24 gradients",
        "drawn in",
    ):
        assert words in said
    assert "left out" not in said and (tmp_path / "a.svg").exists()


def test_a_remainder_is_told(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    run("1f1b", 4, 6, 2, None, as_json=False)
    said = capsys.readouterr().out
    assert "more than (S - 1) / (v M + S - 1) = 3/15" in said
    assert "2 forwards and backwards: 6 is no multiple of 4 stages; none with 4 or 8" in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--stages", "4", "--microbatches", "8", "--name", "1f1"], "Did you mean 1f1b?"),
        (["--stages", "4", "--microbatches", "0"], "microbatches = 0: must be at least 1. Use 1."),
        (["--stages", "4", "--microbatches", "8", "--plot", "a.gif"], "--plot a.gif: the file's name must end in"),
    ],
)
def test_wrong_input(run_jaxpar, tmp_path: Path, args: list[str], said: str):
    result = run_jaxpar(["schedule", *args], cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and said in result.stderr


def test_the_command(run_jaxpar, tmp_path: Path):
    args = ["schedule", "--name", "1f1b", "--stages", "4", "--microbatches", "8", "--chunks", "2", "--plot", "a.png"]
    result = run_jaxpar(args, cwd=tmp_path, env={"COLUMNS": "60", "JAX_PLATFORMS": "nothing_that_could_start"})
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert "1f1b: 4 stages, 8 microbatches, 2 chunks per stage" in result.stdout and "⋯" in result.stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
