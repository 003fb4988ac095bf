"""The checker proves our tables, rejects every table with one wrong entry, and says what is wrong and when."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.pipeline.check import BrokenSchedule, check
from jaxpar.pipeline.schedules import SCHEDULES, Phase, Schedule, make_schedule

sizes = st.tuples(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 11), st.integers(1, 3))
TABLES = ["forward", "backward", "forward_slot", "backward_slot", "output_slot"]


@given(sizes)
def test_all_our_tables_are_right(sizes):
    schedule = make_schedule(*sizes)
    assert check(schedule) == schedule.live


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(16, 128, 1), (8, 60, 3), (2, 1, 8)])
def test_large_tables_are_right(name, stages, microbatches, chunks):
    schedule = make_schedule(name, stages, microbatches, chunks)
    assert check(schedule) == schedule.live


@given(sizes, st.sampled_from(TABLES), st.data())
def test_any_single_wrong_entry_is_found(sizes, name, data):
    schedule = make_schedule(*sizes)
    table = getattr(schedule, name).copy()
    place = tuple(data.draw(st.integers(0, size - 1)) for size in table.shape)
    table[place] = data.draw(st.integers(-2, int(table.max()) + 1).filter(lambda value: value != table[place]))
    with pytest.raises(BrokenSchedule, match=r"^tick \d+, "):
        check(replace(schedule, **{name: table}))


@pytest.fixture
def schedule() -> Schedule:
    """Ticks of forwards: stage 0 has 0 1 2 3, stage 1 has - 0 1 2 3; of backwards: - - 0 1 2 3 and - 0 1 2 3."""
    return make_schedule("1f1b", stages=2, microbatches=4)


def changed(schedule: Schedule, name: str, entries: dict[tuple[int, ...], object]) -> Schedule:
    table = getattr(schedule, name).copy()
    for place, value in entries.items():
        table[place] = value
    return replace(schedule, **{name: table})


@pytest.mark.parametrize(
    ("name", "entries", "said"),
    [
        ("forward", {(0, 0): (1, 0), (1, 0): (0, 0)}, "tick 1, stage 1: the forward of microbatch 0, chunk 0 needs wh"),
        (
            "forward",
            {(2, 0): (1, 0)},
            "tick 2, stage 0: the forward of microbatch 1, chunk 0 has run in tick 1 al",
        ),
        ("forward", {(3, 0): (-1, -1)}, "tick 6, stage 0: the table ends without the forward of microbatch 3, chunk 0"),
        ("forward", {(3, 0): (4, 0)}, "tick 3, stage 0: the forward of microbatch 4, chunk 0 does not exist"),
        ("forward", {(3, 0): (3, 1)}, "tick 3, stage 0: the forward of microbatch 3, chunk 1 does not exist"),
        ("forward", {(4, 0): (-1, 0)}, "tick 4, stage 0: the forward of microbatch -1, chunk 0 does not exist"),
        (
            "backward",
            {(4, 0): (3, 0), (5, 0): (2, 0)},
            "tick 4, stage 0: the backward of microbatch 3, chunk 0 needs what tick 3 sends, but its input is made in "
            "tick 4.",
        ),
        (
            "forward_slot",
            {(2, 0): 0},
            "tick 2, stage 0: the forward of microbatch 2, chunk 0 overwrites slot 0, which still holds microbatch 0, "
            "chunk 0.",
        ),
        ("forward_slot", {(2, 0): -1}, "tick 2, stage 0: the forward of microbatch 2, chunk 0 writes slot -1"),
        ("forward_slot", {(4, 0): 0}, "tick 4, stage 0: the forward of microbatch -1, chunk -1 writes slot 0"),
        ("forward_slot", {(2, 0): 3}, "tick 2, stage 0: slot 3 is written, but there are only 3"),
        ("backward_slot", {(2, 0): 1}, "tick 2, stage 0: the backward of microbatch 0, chunk 0 reads slot 1, which is"),
        ("backward_slot", {(2, 0): -1}, "tick 2, stage 0: the backward of microbatch 0, chunk 0 reads slot -1"),
        ("output_slot", {(2, 0): 1}, "tick 2, output: slot 1 is written, but there are only 1"),
        ("output_slot", {(2, 1): -1}, "tick 2, output: the backward of microbatch 1, chunk 0 reads slot -1"),
        ("output_slot", {(0, 0): 0}, "tick 0, output: the forward of microbatch -1, chunk -1 writes slot 0"),
    ],
)
def test_what_is_wrong_is_said(schedule, name, entries, said):
    with pytest.raises(BrokenSchedule) as error:
        check(changed(schedule, name, entries))
    assert said in str(error.value)


def test_a_backward_before_its_forward(schedule):
    """All arrive one tick after they are sent, but from a head that has not been computed."""
    backward = np.roll(schedule.backward, -1, axis=0)
    with pytest.raises(BrokenSchedule, match="tick 0, stage 1: the backward of microbatch 0, chunk 0 comes before its"):
        check(replace(schedule, backward=backward, phases=(Phase(True, True, 0, schedule.ticks),)))


def test_an_activation_that_has_to_wait(schedule):
    """An executor with queues could run it; ours overwrites what is not used at once."""
    later = lambda table: np.insert(table, 1, -1, axis=0)
    forward = later(schedule.forward)
    forward[1, 0], forward[2, 0] = forward[2, 0], (-1, -1)
    slots = later(schedule.forward_slot)
    slots[1, 0], slots[2, 0] = slots[2, 0], -1
    tables = {name: later(getattr(schedule, name)) for name in ("backward", "backward_slot", "output_slot")}
    table = replace(schedule, forward=forward, forward_slot=slots, **tables, phases=(Phase(True, True, 0, 7),))
    with pytest.raises(BrokenSchedule, match=r"tick 2, stage 1: .* microbatch 0, chunk 0 needs what tick 1 sends"):
        check(table)


def test_a_gradient_that_has_to_wait(schedule):
    """The same of the last backward, a tick later than its gradient arrives."""
    longer = lambda table: np.insert(table, schedule.ticks, -1, axis=0)
    tables = {name: longer(getattr(schedule, name)) for name in TABLES}
    for name in ("backward", "backward_slot"):
        tables[name][6, 0], tables[name][5, 0] = tables[name][5, 0], -1
    table = replace(schedule, **tables, phases=(Phase(True, True, 0, 7),))
    with pytest.raises(BrokenSchedule, match=r"tick 6, stage 0: .* microbatch 3, chunk 0 needs what tick 5 sends"):
        check(table)


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        (
            [(True, False, 0, 2), (True, True, 2, 5), (False, True, 5, 6)],
            "tick 1, stage 1: goes backward in",
        ),
        ([(True, True, 0, 4), (False, True, 4, 6)], "tick 4, stage 1: goes forward in the phase"),
        ([(True, True, 0, 2), (True, True, 3, 6)], "tick 2: the phase"),
        ([(True, True, 0, 5)], "tick 5: no phase has it"),
        ([(True, True, 0, 6), (True, True, 6, 6)], "tick 6: the phase"),
    ],
)
def test_wrong_phases(schedule, phases, said):
    with pytest.raises(BrokenSchedule, match=said):
        check(replace(schedule, phases=tuple(Phase(*phase) for phase in phases)))


def test_wrong_shapes(schedule):
    for name in TABLES:
        with pytest.raises(BrokenSchedule, match=rf"^{name} is"):
            check(replace(schedule, **{name: getattr(schedule, name)[..., :1]}))
        with pytest.raises(BrokenSchedule, match=rf"^{name} is float64"):
            check(replace(schedule, **{name: getattr(schedule, name).astype(float)}))


def test_a_table_by_hand():
    """Another order than ours that is right as well: one microbatch after the other, on one stage."""
    work = np.array([[[0, 0]], [[-1, -1]], [[1, 0]], [[-1, -1]]])
    slot = np.array([[0], [-1], [0], [-1]])
    table = Schedule(
        name="by hand",
        stages=1,
        chunks=1,
        microbatches=2,
        forward=work,
        backward=np.roll(work, 1, axis=0),
        forward_slot=slot,
        backward_slot=np.roll(slot, 1, axis=0),
        slots=1,
        output_slot=np.array([[0, -1], [-1, 0], [0, -1], [-1, 0]]),
        output_slots=1,
        phases=(Phase(True, True, 0, 4),),
    )
    assert check(table) == (1,)
