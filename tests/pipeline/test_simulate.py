"""The simulator against published bubble rates, closed forms, and the counts of the tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.config import InputError
from jaxpar.pipeline import simulate
from jaxpar.pipeline.orders import make_orders
from jaxpar.pipeline.schedules import SCHEDULES, Work, make_schedule
from jaxpar.pipeline.simulate import Costs, asynchronous, lockstep

# Zero Bubble (arXiv:2401.10241) tables 4, 5 and 9, models of 1.5B and 14.6B, 3 chunks where interleaved:
# stages, microbatches; bubble rates of 1F1B, ZB-H1, ZB-H2, interleaved 1F1B; ms forward, input gradient, weight
# gradient, message.
ZERO_BUBBLE = [
    (8, 24, 0.2431, 0.1585, 0.1083, 0.1055, 18.522, 18.086, 9.337, 0.601),
    (8, 32, 0.1985, 0.1242, 0.0837, 0.0818, 18.513, 18.086, 9.331, 0.626),
    (8, 64, 0.1240, 0.0674, 0.0444, 0.0443, 18.546, 18.097, 9.321, 0.762),
    (16, 48, 0.2552, 0.1397, 0.0672, 0.1104, 11.347, 11.248, 8.132, 0.377),
    (16, 64, 0.2082, 0.1088, 0.0516, 0.0852, 11.307, 11.254, 8.101, 0.379),
    (16, 128, 0.1251, 0.0576, 0.0266, 0.0445, 11.325, 11.308, 8.109, 0.378),
]
rows = pytest.mark.parametrize("row", ZERO_BUBBLE, ids=lambda row: f"S{row[0]}-M{row[1]}")


@rows
@pytest.mark.parametrize(("column", "name"), [(2, "1f1b"), (3, "zb-h1"), (4, "zb-h2")])
def test_zero_bubble_rates_to_four_decimals(row, column: int, name: str):
    S, M, *_, forward, input_gradient, weight_gradient, message = row
    timeline = asynchronous(make_orders(name, S, M), Costs(forward, input_gradient, weight_gradient, message))
    assert timeline.bubble == pytest.approx(row[column], abs=5.1e-5)


def interleaved_bubble(row) -> float:
    S, M, *_, forward, input_gradient, weight_gradient, message = row
    costs = Costs(forward / 3, input_gradient / 3, weight_gradient / 3, message)
    return asynchronous(make_orders("1f1b", S, M, chunks=3), costs).bubble


@rows
def test_zero_bubble_interleaved(row):
    """Ours is 2.9 to 4.2% above the published estimate: 0.14 to 0.35 points, and within 0.4% of its total time.

    The published program lets only the first microbatch of each group of S wait for its message from one chunk to
    the next (see the next test), so that S messages fewer lie on its longest path.
    """
    published, ours = row[5], interleaved_bubble(row)
    assert published < ours < published * 1.042
    assert (1 - published) / (1 - ours) == pytest.approx(1, abs=0.004)  # ratio of the total times


@rows
def test_zero_bubble_interleaved_with_its_shortcut(row, monkeypatch):
    """Without the inputs that the published program does not wait for, its rates come out to four decimals."""
    all_inputs, S = simulate._source, row[0]

    def fewer_inputs(work: Work, part: int, last_part: int):
        source = all_inputs(work, part, last_part)
        from_other_chunk = source is not None and source[0] == work.kind and source[2] // S != work.chunk
        return None if from_other_chunk and work.microbatch % S else source

    monkeypatch.setattr(simulate, "_source", fewer_inputs)
    assert interleaved_bubble(row) == pytest.approx(row[5], abs=5.1e-5)


sizes = st.tuples(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 11), st.integers(1, 3))
times = st.integers(1, 20)


@given(st.integers(1, 6), st.integers(1, 12), times, times, st.sampled_from(SCHEDULES))
def test_asynchronous_without_messages_is_the_textbooks(S, M, forward, backward, name):
    timeline = asynchronous(make_orders(name, S, M), Costs(forward, backward, 0))
    assert timeline.total == pytest.approx((M + S - 1) * (forward + backward))
    assert timeline.bubble == pytest.approx((S - 1) / (M + S - 1))
    assert max(timeline.live) == (M if name == "gpipe" else min(S, M))


@given(sizes, times, times, times)
def test_lockstep_bubble_is_the_tables(sizes, forward, input_gradient, weight_gradient):
    schedule = make_schedule(*sizes)
    timeline = lockstep(schedule, Costs(forward, input_gradient, weight_gradient))
    assert timeline.bubble == pytest.approx(schedule.bubble)
    assert timeline.live == schedule.live


@given(st.integers(2, 6), st.integers(1, 12), times, times, times)
def test_lockstep_messages_travel_beside_work(S, M, forward, backward, message):
    timeline = lockstep(make_schedule("1f1b", S, M), Costs(forward, backward, 0, message))
    both = max(forward, message) + max(backward, message)
    # Outside the middle phase a message has nothing to travel beside.
    assert timeline.total == (S - 1) * (forward + message) + M * both + (S - 1) * (backward + message)


@given(sizes, times, times, times)
def test_stages_at_their_own_pace_are_never_later_than_in_lockstep(sizes, forward, input_gradient, weight_gradient):
    schedule, costs = make_schedule(*sizes), Costs(forward, input_gradient, weight_gradient)
    assert asynchronous(schedule.orders, costs).total <= lockstep(schedule, costs).total


def test_every_tick_waits_for_the_slowest_stage():
    S, M = 3, 5
    schedule = make_schedule("1f1b", S, M)
    timeline = lockstep(schedule, Costs(forward=[[1, 5, 1]], input_gradient=[[1, 1, 7]], weight_gradient=0))
    slow_forwards = [t for t in range(schedule.ticks) if schedule.forward[t, 1, 0] >= 0]
    slow_backwards = [t for t in range(schedule.ticks) if schedule.backward[t, 2, 0] >= 0]
    others = M + S - 1 - M  # ticks with forwards in which the slow stage has none; as many with backwards
    assert len(slow_forwards) == len(slow_backwards) == M
    assert timeline.total == 5 * M + 7 * M + 2 * others


def test_zero_bubble_memory():
    """ZB-H1 holds at most S microbatches, as 1F1B; ZB-H2 at most 2S - 1 (arXiv:2401.10241, section 2)."""
    S, M = 6, 24
    assert asynchronous(make_orders("zb-h1", S, M), Costs()).live == (S,) * S
    h2 = asynchronous(make_orders("zb-h2", S, M), Costs())
    assert max(h2.live) == 2 * S - 1 and h2.bubble == pytest.approx(0)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
@given(S=st.integers(1, 6), M=st.integers(1, 12))
def test_orders_do_everything_once(name, S, M):
    for order in make_orders(name, S, M):
        assert sorted(order) == sorted(Work(kind, m, 0) for kind in ("F", "B", "W") for m in range(M))
    asynchronous(make_orders(name, S, M), Costs())  # and nobody waits for ever


def test_stages_that_wait_for_each_other():
    F, B = Work("F", 0, 0), Work("B", 0, 0)
    with pytest.raises(InputError, match=r"stage 0 waits for ever with its work number 1, Work\(kind='B'"):
        asynchronous([(F, B), (B, F)], Costs())


def test_wrong_input():
    with pytest.raises(InputError, match=r"chunks = 2: zb-h1 has one chunk per stage. Use chunks = 1"):
        make_orders("zb-h1", 2, 2, chunks=2)
    with pytest.raises(InputError, match=r"schedule = zb-h3: must be one of .* Did you mean zb-h2"):
        make_orders("zb-h3", 2, 2)
