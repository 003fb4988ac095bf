"""Closed forms of schedules against the tables themselves and what the executor makes of them."""

from itertools import product

import pytest

from jaxpar.pipeline.schedules import SCHEDULES, make_schedule
from jaxpar.pipeline.slots import idle_slots
from jaxpar.planner.ticks import Ticks, _slots, ticks


def test_slots_are_those_of_all_microbatches():
    """More than fill the stages are not laid out; `test_counts_are_the_table_s` has few microbatches."""
    for stages, microbatches, chunks in product((2, 3, 8), range(1, 70), (1, 2, 5)):
        found = ticks("1f1b", stages, microbatches, chunks)
        assert found.slots == _slots(stages, microbatches, chunks, chunks * stages - 1)
    assert ticks("1f1b", 8, 2**30, 2).slots == ticks("1f1b", 8, 64, 2).slots
    assert ticks("gpipe", 2, 2**30, 1).slots == 2**30 + 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_counts_are_the_table_s(name: str):
    for stages, microbatches, chunks in product((2, 3, 4), (1, 2, 3, 4, 5, 8, 11), (1, 2, 3)):
        table = make_schedule(name, stages, microbatches, chunks)
        lengths = {phase: phase.stop - phase.start for phase in table.phases}
        heads = [p for p in table.phases if (table.output_slot[p.start : p.stop, 1] >= 0).any()]
        written = [idle_slots(table.forward_slot[:, s], table.backward_slot[:, s]).max() for s in range(stages)]
        expected = Ticks(
            forward=sum(length for phase, length in lengths.items() if phase.forward),
            backward=sum(length for phase, length in lengths.items() if phase.backward),
            both=sum(length for phase, length in lengths.items() if phase.forward and phase.backward),
            head=sum(lengths[phase] for phase in heads),
            slots=max(written) + 1,
            outputs=idle_slots(*table.output_slot.T).max() + 1,
        )
        assert ticks(name, stages, microbatches, chunks) == expected, (stages, microbatches, chunks)
