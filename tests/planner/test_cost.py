"""The time of a step: closed forms against the schedule simulator, and what must hold between layouts."""

from dataclasses import replace
from itertools import product

import pytest

from jaxpar.config import ModelConfig
from jaxpar.pipeline.schedules import SCHEDULES, make_schedule
from jaxpar.pipeline.simulate import Costs, lockstep
from jaxpar.planner.cluster import Efficiency, parse_cluster
from jaxpar.planner.cost import least_seconds, step_seconds
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.price import partition_of
from jaxpar.planner.ticks import ticks
from jaxpar.planner.work import head_seconds, layer_work

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=32768,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=8,
)
WORKLOAD = Workload(2048, 64)
CLUSTER = parse_cluster("2xh100x8")
FREE = replace(CLUSTER, efficiency=replace(CLUSTER.efficiency, layer_seconds=1e-5))


def of(layout: Layout, cluster=CLUSTER, workload: Workload = WORKLOAD):
    height = partition_of(MODEL, layout.pipe, layout.chunks).height
    return step_seconds(MODEL, layout, workload, cluster, height)


@pytest.mark.parametrize("name", SCHEDULES)
def test_ticks_are_the_simulator_s(name: str):
    """Compute and bubble are the simulator's total and, since it has none, the heads."""
    for pipe, microbatches, chunks in product((2, 4), (2, 4, 8), (1, 2, 3)):
        layout = Layout(1, pipe, 1, schedule=name, chunks=chunks, microbatches=microbatches)
        b = WORKLOAD.sequences_per_microbatch(layout)
        work = layer_work(MODEL, b, 2048, 1, False, "bfloat16", FREE)
        rows = 24 // (pipe * chunks)
        costs = Costs(rows * work.forward, rows * work.backward, 0.0)
        simulated = lockstep(make_schedule(name, pipe, microbatches, chunks), costs).total
        found = of(layout, FREE)
        head = sum(head_seconds(MODEL, b, 2048, pipe, "bfloat16", FREE))
        heads = ticks(name, pipe, microbatches, chunks).head
        assert found.compute + found.bubble == pytest.approx(simulated + heads * head), layout


def test_bubble_is_the_textbook_s():
    found = of(Layout(1, 4, 1, microbatches=16), FREE)
    work = layer_work(MODEL, 4, 2048, 1, False, "bfloat16", FREE)
    assert found.bubble == pytest.approx(3 * 6 * (work.forward + work.backward))
    halved = of(Layout(1, 4, 1, microbatches=16, chunks=2), FREE)
    # On GPUs the head runs in every tick with a forward and a backward, with two chunks 28 for 16 microbatches.
    idle_heads = 12 * sum(head_seconds(MODEL, 4, 2048, 4, "bfloat16", FREE))
    assert halved.bubble - idle_heads == pytest.approx(found.bubble / 2)
    assert of(Layout(4, 1, 4, microbatches=4)).bubble == 0.0


def test_padding_is_work():
    even, padded = (of(Layout(1, pipe, 1, microbatches=16), FREE).compute for pipe in (4, 5))  # 6 against 5 of 24/5
    head = lambda pipe: 16 * sum(head_seconds(MODEL, 4, 2048, pipe, "bfloat16", FREE))
    assert (padded - head(5)) / (even - head(4)) == pytest.approx(5 / 6)


def test_recomputation_adds_a_forward():
    plain, dots, full = (of(Layout(2, 1, 8, microbatches=4, remat=r), FREE).compute for r in ("none", "dots", "full"))
    work = layer_work(MODEL, 8, 2048, 8, False, "bfloat16", FREE)
    assert full - plain == pytest.approx(4 * 24 * work.forward)
    assert plain < dots < full


def test_xla_s_attention_takes_longer_and_again_where_it_is_recomputed():
    xla = replace(WORKLOAD, attention="xla")
    work, slow = (layer_work(MODEL, 8, 2048, 8, False, "bfloat16", FREE, a) for a in ("flash", "xla"))
    for remat, forwards in (("none", 1), ("full", 2)):
        layout = Layout(2, 1, 8, microbatches=4, remat=remat)
        longer = of(layout, FREE, xla).compute - of(layout, FREE).compute
        more = forwards * (slow.forward - work.forward) + slow.backward - work.backward
        assert longer == pytest.approx(4 * 24 * more) and longer > 0
        assert least_seconds(MODEL, layout, xla, FREE) - least_seconds(MODEL, layout, WORKLOAD, FREE) == pytest.approx(
            longer
        )


def test_starting_kernels_takes_its_time():
    slow = replace(CLUSTER, efficiency=Efficiency(layer_seconds=1e-2))
    assert of(Layout(2, 1, 8, microbatches=32), slow).compute == pytest.approx(32 * 24 * 1e-2, rel=0.05)


def test_gradients_cross_hosts_once_a_step():
    few, many = (of(Layout(16, 1, 1, microbatches=m)).data for m in (1, 4))
    assert few == many > 0.02
    assert of(Layout(1, 2, 8, microbatches=4)).data == 0.0


def test_zero_takes_no_longer_than_its_bytes_say():
    stage = lambda zero, m=4: of(Layout(16, 1, 1, zero, microbatches=m))
    assert stage(1).data == stage(2).data > 0
    assert stage(2, 1).data < stage(1, 1).data, "scatters hide behind the backward"
    assert stage(3, 4).data > stage(3, 1).data, "every microbatch gathers"
    assert stage(1).optimizer < stage(0).optimizer


def test_tensor_parallel_is_dear_across_hosts():
    inside, across = of(Layout(2, 1, 8, microbatches=8)), of(Layout(1, 1, 16, microbatches=8))
    assert across.tensor > 2 * inside.tensor > 0


def test_every_hop_costs():
    slow = replace(CLUSTER, efficiency=replace(CLUSTER.efficiency, hop_seconds=1e-2))
    hops = lambda chunks: (
        of(Layout(1, 4, 4, microbatches=8, chunks=chunks), slow).pipe
        - of(Layout(1, 4, 4, microbatches=8, chunks=chunks)).pipe
    )
    # Those in ticks with both hide while computing takes longer; alone are v·p - 1 ticks each way.
    assert hops(1) == pytest.approx(2 * 3 * (1e-2 - 2e-5), rel=0.01)
    assert hops(3) > 2.9 * hops(1)


@pytest.mark.parametrize("zero", [0, 3])
def test_the_bound_is_one(zero: int):
    for pipe, tensor, chunks, remat in product((1, 2, 5), (1, 2, 8), (1, 2), ("none", "full")):
        if pipe == 1 and chunks > 1:
            continue
        layout = Layout(2, pipe, tensor, zero, chunks=chunks, microbatches=8, remat=remat)
        assert 0 < least_seconds(MODEL, layout, WORKLOAD, CLUSTER) <= of(layout).total
