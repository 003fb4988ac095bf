"""The tables against the closed forms of the papers, over random sizes; that they are right is proved in test_check."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.config import InputError
from jaxpar.pipeline.schedules import SCHEDULES, Phase, Schedule, make_schedule

sizes = st.tuples(st.sampled_from(SCHEDULES), st.integers(1, 7), st.integers(1, 20), st.integers(1, 4))


def idle_places(schedule: Schedule) -> tuple[int, int]:
    """Places in ticks with forwards or backwards, and how many of them are empty, counted one by one."""
    places = idle = 0
    for phase in schedule.phases:
        for kind in ("forward", "backward"):
            if getattr(phase, kind):
                for tick in range(phase.start, phase.stop):
                    for stage in range(schedule.stages):
                        places += 1
                        idle += bool(getattr(schedule, kind)[tick, stage, 0] < 0)
    return places, idle


@given(sizes)
def test_bubble_is_the_textbooks(sizes):
    name, S, M, v = sizes
    schedule = make_schedule(name, S, M, v)
    places, idle = idle_places(schedule)
    assert schedule.bubble == pytest.approx(idle / places, abs=1e-12)
    if v == 1 or M % S == 0:
        assert idle * (v * M + S - 1) == (S - 1) * places  # exactly (S - 1) / (v M + S - 1)
        assert schedule.gap_ticks == 0


@given(sizes)
def test_a_remainder_costs_what_the_docstring_says(sizes):
    """Idle places cost (v - 1) (S - M mod S) ticks; masked microbatches would cost S - M mod S more."""
    name, S, M, v = sizes
    schedule, missing = make_schedule(name, S, M, v), -M % S
    with_forwards = sum(p.stop - p.start for p in schedule.phases if p.forward)
    assert with_forwards == v * M + S - 1 + (v - 1) * missing
    assert schedule.gap_ticks == (v - 1) * missing
    padded = make_schedule(name, S, M + missing, v)
    masked = sum(p.stop - p.start for p in padded.phases if p.forward) - (v * M + S - 1)
    assert masked - schedule.gap_ticks == missing


@given(sizes)
def test_live_inputs_do_not_grow_with_microbatches(sizes):
    name, S, M, v = sizes
    schedule = make_schedule(name, S, M, v)
    assert schedule.slots == max(schedule.live)  # the lowest free slot wastes none
    if name == "gpipe":
        assert schedule.live == (v * M,) * S and schedule.output_slots == M
    else:
        most = 2 * S - 1 if v == 1 else S * (v + 1) - 1
        assert schedule.slots <= min(most, v * M) and schedule.output_slots == 1
        if M >= 2 * S:
            assert schedule.slots == most
            assert schedule.live == tuple(most - 2 * s for s in range(S))


@given(sizes)
def test_phases(sizes):
    name, S, M, v = sizes
    schedule = make_schedule(name, S, M, v)
    for phase in schedule.phases:  # no tick of a phase is without the work that gives it its name
        for kind in ("forward", "backward"):
            busy = (getattr(schedule, kind)[phase.start : phase.stop, :, 0] >= 0).any(axis=1)
            assert (busy == getattr(phase, kind)).all()
    labels = [phase.label for phase in schedule.phases]
    if name == "gpipe":
        assert labels == ["forward only", "backward only"]
    else:
        assert labels == ["forward only", "both", "backward only"][v * S == 1 : 2 if v * S == 1 else 3]


def test_1f1b_by_hand():
    """Stage s runs microbatch m forward at tick m + s and backward at tick m + 2 (S - 1) - s."""
    schedule = make_schedule("1f1b", stages=3, microbatches=4)
    for s in range(3):
        for m in range(4):
            assert tuple(schedule.forward[m + s, s]) == (m, 0)
            assert tuple(schedule.backward[m + 4 - s, s]) == (m, 0)
    assert schedule.phases == (Phase(True, False, 0, 2), Phase(True, True, 2, 6), Phase(False, True, 6, 8))
    assert schedule.ticks == 8 and schedule.messages == 2 * 4 * 2
    assert schedule.forward.dtype == np.int32 and not schedule.forward.flags.writeable


def test_interleaved_by_hand():
    """Megatron's figure (arXiv:2104.04473, figure 4) for 4 stages, 8 microbatches and 2 chunks, first stage."""
    order = make_schedule("1f1b", stages=4, microbatches=8, chunks=2).orders[0]
    forwards = [(w.microbatch, w.chunk) for w in order if w.kind == "F"]
    backwards = [(w.microbatch, w.chunk) for w in order if w.kind == "B"]
    assert forwards == [(m + g, c) for g in (0, 4) for c in (0, 1) for m in range(4)]
    assert backwards == [(m + g, c) for g in (0, 4) for c in (1, 0) for m in range(4)]
    warmup = 2 * (4 - 1) + (2 - 1) * 4  # Megatron's number of warm-up forwards; then forward and backward in turn
    assert [w.kind for w in order] == ["F"] * warmup + ["F", "B"] * (16 - warmup) + ["B"] * warmup


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("gpip", 2, 2), "schedule = gpip: must be one of gpipe, 1f1b. Did you mean gpipe?"),
        (("interleaved_1f1b", 2, 2), "Interleaved 1F1B is 1f1b with chunks = 2 or more."),
        (("1f1b", 0, 2), "stages = 0: must be at least 1. Use 1."),
        (("1f1b", 2, -3), "microbatches = -3: must be at least 1. Use 1."),
        (("gpipe", 2, 2, 0), "chunks = 0: must be at least 1. Use 1."),
    ],
)
def test_wrong_input(args, said):
    with pytest.raises(InputError) as error:
        make_schedule(*args)
    assert said in str(error.value)
