"""What people see of a plan: tables, reasons, pictures."""

from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.console import Console
from rich.table import Table

from jaxpar.planner import explain
from jaxpar.planner.layout import Layout
from jaxpar.planner.plan import Plan, make_plan
from jaxpar.planner.plot import bars, draw, picture
from jaxpar.planner.price import TimeParts
from jaxpar.planner.words import gigabytes, in_words
from jaxpar.quantities import seconds
from tests.planner.stand_in import STAND_IN
from tests.planner.tasks import task

FITS = task("layers=20,hidden=8192,heads=8,kv=8,ffn=28672,vocab=32000", "2xh100x4", global_batch=8)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(*FITS, top=3, ask=STAND_IN)


@pytest.fixture(scope="module")
def nothing() -> Plan:
    return make_plan(*task("layers=24,hidden=16384,heads=8,ffn=28672,vocab=32000", "1xh100x4"), ask=STAND_IN)


def cells(table: Table) -> dict[str, list[str]]:
    """The columns of a table by their headings."""
    return {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}


def printed(plan: Plan) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        for part in explain.parts(plan):
            console.print(part, soft_wrap=not isinstance(part, Table))
    return capture.get()


def test_the_ranked_list_has_what_the_prices_have(plan: Plan):
    table = cells(explain.layouts(plan))
    assert table["tensor"] == [str(price.layout.tensor) for price in plan.ranked]
    assert table["pipe"] == [str(price.layout.pipe) for price in plan.ranked]
    assert table["tokens/s"] == [f"{price.tokens_per_second:,.0f}" for price in plan.ranked]
    assert table["memory"] == [gigabytes(price.memory.total) for price in plan.ranked]
    for price, batches in zip(plan.ranked, table["microbatches"], strict=True):
        count, size = map(int, batches.split(" × "))
        assert count == price.layout.microbatches and count * size * price.layout.data == 8
    assert "3 of the 9 that fit" in str(explain.layouts(plan).title)


def test_time_and_memory_are_split(plan: Plan):
    times, sizes = cells(explain.time_table(plan.ranked)), cells(explain.memory_table(plan.ranked))
    for i, price in enumerate(plan.ranked):
        assert times["over tensor"][i] == seconds(price.time.tensor)
        assert times["over pipe"][i] == seconds(price.time.pipe)
        assert times["over data"][i] == seconds(price.time.data)
        assert times["bubble"][i] == seconds(price.time.bubble)
        assert times["all together"][i] == seconds(price.time.total)
        assert sizes["optimizer state"][i] == gigabytes(price.memory.optimizer)
        assert sizes["activations"][i] == gigabytes(price.memory.activations)
        assert sizes["all together"][i] == gigabytes(price.memory.total)


def test_everything_is_said(plan: Plan):
    text = printed(plan)
    assert "2 × 4 H100 = 8 devices" in text and "8 sequences × 2,048 = 16,384 tokens a step" in text
    assert "20 layers on" in text  # which stage has which
    assert plan.advice is not None and plan.advice.text in text
    rows = cells(explain.reasons(plan))
    assert "tensor 8" in rows["choice"] and rows[""] == [row.reason for row in plan.rejected]
    assert f"{plan.priced:,} layouts were priced" in text and "Nothing fits" not in text


def test_where_nothing_fits_the_nearest_and_the_ways_out_are_said(nothing: Plan):
    assert nothing.nearest is not None
    text = printed(nothing)
    assert "1 × 4 H100 = 4 devices" in text
    assert "Nothing fits." in text and in_words(nothing.nearest.layout, nothing.workload) in text
    assert f"{gigabytes(nothing.nearest.memory.total)} against {gigabytes(nothing.cluster.usable_bytes)}" in text
    assert nothing.remedies and all(remedy in text for remedy in nothing.remedies)
    assert "that fit" not in text


def test_values_with_larger_ones_alike_are_said_once():
    long = task("layers=4,hidden=8192,heads=8,ffn=8192,vocab=512", "1xh100x1", sequence_length=2**17, global_batch=16)
    plan = make_plan(*long, ask=STAND_IN)
    assert "microbatch 8 and above" in cells(explain.reasons(plan))["choice"]
    assert "1 × 1 H100 = 1 device, of each" in explain.task(plan)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_of_the_top_layouts(plan: Plan, tmp_path: Path, ending: str):
    file = tmp_path / f"plan.{ending}"
    draw(plan, file)
    if ending == "svg":
        text = file.read_text()
        for said in ("Memory of the fullest stage", "Time of a step", "optimizer state", "bubble", "usable 78.1 GB"):
            assert f"<!-- {said} -->" in text
        assert all(f"{p.layout.data} × {p.layout.pipe} × {p.layout.tensor}" in text for p in plan.ranked)
    else:
        assert matplotlib.image.imread(file).shape[1] > 1000


@pytest.mark.parametrize("layouts", [1, 3])
def test_legends_cover_nothing_and_are_whole(plan: Plan, layouts: int):
    long = Layout(2, 2, 2, 1, microbatches=4, sequence_parallel=True, algorithm="halving_doubling")
    every = TimeParts(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    figure = picture(replace(plan, ranked=(replace(plan.ranked[0], layout=long, time=every),) * layouts))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    right = 0.0  # end of the legend before
    for axes in figure.axes:
        legend, label = axes.get_legend(), axes.xaxis.label.get_window_extent(canvas.get_renderer())
        assert legend is not None
        box = legend.get_window_extent(canvas.get_renderer())
        assert box.y1 <= label.y0 < axes.get_window_extent().y0
        assert right <= box.x0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0
        right = box.x1


def test_bars_are_stacked():
    axes = Figure().subplots()
    bars(axes, {"a": [1.0, 2.0], "nothing": [0.0, 0.0], "b": [3.0, 0.5], "c": [1.0, 1.0], "d": [0.0, 1.0], "e": [1, 1]})
    spans = [(patch.get_x(), patch.get_width()) for patch in axes.patches if isinstance(patch, Rectangle)]
    assert spans == [(0, 1), (0, 2), (1, 3), (2, 0.5), (4, 1), (2.5, 1), (5, 0), (3.5, 1), (5, 1), (4.5, 1)]


def test_a_picture_of_the_nearest(nothing: Plan, tmp_path: Path):
    draw(nothing, tmp_path / "nearest.svg")
    assert "<!-- activations -->" in (tmp_path / "nearest.svg").read_text()
