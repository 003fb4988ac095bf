"""Drawings: every piece of work is where the timeline has it, in the terminal and in files."""

import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image

from jaxpar.config import InputError
from jaxpar.pipeline.draw import plot, shade, text, text_width
from jaxpar.pipeline.orders import ORDERS, make_orders
from jaxpar.pipeline.schedules import SCHEDULES, make_schedule
from jaxpar.pipeline.simulate import Costs, Timeline, asynchronous, lockstep


def make_timeline(name: str, stages: int, microbatches: int, chunks: int = 1) -> Timeline:
    if name in SCHEDULES:
        return lockstep(make_schedule(name, stages, microbatches, chunks), Costs())
    return asynchronous(make_orders(name, stages, microbatches), Costs())


timelines = st.builds(make_timeline, st.sampled_from(ORDERS), st.integers(1, 4), st.integers(1, 13), st.integers(1, 3))
KIND_OF_BRACKET = {"": "F", "(": "B", "[": "W"}


def test_a_picture():
    assert text(make_timeline("1f1b", 2, 2, 2), width=100, colour=False).plain.splitlines() == [
        "stage 0 │0a 1a 0b 1b          (0b)  (1b)  (0a)  (1a)  │",
        "stage 1 │   0a 1a 0b (0b)  1b (1b)  (0a)  (1a)        │",
    ]


@given(timelines)
def test_all_work_is_in_the_text(timeline):
    lines = text(timeline, 10_000, colour=False).plain.splitlines()
    assert len(lines) == timeline.stages and {len(line) for line in lines} == {text_width(timeline, colour=False)}
    unit = (len(lines[0]) - len("stage 0 ││")) // round(timeline.total)
    for stage, line in enumerate(lines):
        cells = re.finditer(r"([(\[]?)(\d+)([a-z]?)", line.partition("│")[2])
        drawn = [
            (m.start() / unit, KIND_OF_BRACKET[m[1]], int(m[2]), ord(m[3]) - ord("a") if m[3] else 0) for m in cells
        ]
        events = sorted((e.start, *e.work) for e in timeline.events if e.stage == stage)
        assert drawn == events


@given(timelines)
def test_colours_take_as_much_room_as_the_work_takes_time(timeline):
    drawn = text(timeline, 10_000, colour=True)
    painted: Counter[str] = Counter()
    for line in drawn.split("\n")[: timeline.stages]:
        for span in line.spans:
            painted[str(span.style).split()[-1]] += span.end - span.start
    unit = (len(drawn.split("\n")[0]) - len("stage 0 ││")) // round(timeline.total)
    time: Counter[str] = Counter()
    for event in timeline.events:
        time[shade(event.work.kind, event.work.chunk, timeline.chunks)[0]] += unit * round(event.stop - event.start)
    assert painted == time


@given(timelines, st.integers(40, 120), st.booleans())
def test_what_is_too_wide_is_cut_in_the_middle(timeline, width, colour):
    whole = text(timeline, 10_000, colour).plain.splitlines()[: timeline.stages]
    lines = text(timeline, width, colour).plain.splitlines()
    assert all(len(line) <= width for line in lines[: timeline.stages])
    if len(whole[0]) <= width:
        assert lines[: timeline.stages] == whole
    else:
        assert lines[-1].startswith("⋯ ") and str(len(whole[0])) in lines[-1]
        assert all(cut[:12] == line[:12] and cut[-1] == line[-1] for cut, line in zip(lines, whole, strict=False))


def test_shades_differ():
    colours = {shade(kind, chunk, 4) for kind in "FBW" for chunk in range(4)}
    assert len(colours) == 12


def area(picture: np.ndarray, colour: str) -> int:
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(picture[..., :3] * 255 - wanted).max(axis=-1) < 2).sum())


@pytest.mark.parametrize(("stages", "microbatches"), [(3, 5), (4, 40)])
def test_png(tmp_path: Path, stages: int, microbatches: int):
    plot(make_timeline("1f1b", stages, microbatches), "title", "subtitle", tmp_path / "a.png")
    picture = image.imread(tmp_path / "a.png")
    forward, backward, idle = (area(picture, c) for c in (shade("F", 0, 1)[0], shade("B", 0, 1)[0], "#f3f4f6"))
    assert backward / forward == pytest.approx(2, rel=0.1)  # two units of time and one, less edges and labels
    work, bubble = forward + backward, (stages - 1) / (microbatches + stages - 1)
    assert idle / (idle + work) == pytest.approx(bubble, abs=0.06)  # labels and edges hide some of the work


def test_svg(tmp_path: Path):
    plot(make_timeline("gpipe", 2, 3, 2), "the title", "the subtitle", tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    for words in ("the title", "the subtitle", "stage 1", "forward only", "backward only", "backward, chunk 1", "idle"):
        assert f">{words}</text>" in drawn
    labels = Counter(re.findall(r">(\d)</text>", drawn))
    assert labels["2"] >= 2 * 2 * 2  # each microbatch: two stages, two chunks, forward and backward


def test_wrong_file(tmp_path: Path, monkeypatch):
    timeline = make_timeline("gpipe", 2, 3)
    with pytest.raises(InputError, match=r"a\.jpg: the file's name must end in \.png, \.svg, \.pdf"):
        plot(timeline, "", "", tmp_path / "a.jpg")
    with pytest.raises(InputError, match="No such file or directory"):
        plot(timeline, "", "", tmp_path / "missing" / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'jaxpar\[plot\]'"):
        plot(timeline, "", "", tmp_path / "a.png")
