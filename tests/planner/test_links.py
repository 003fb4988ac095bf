"""Which devices take part in a collective, and how long it takes on their links."""

import itertools
from dataclasses import replace

import pytest

from jaxpar.planner.cluster import Cluster, parse_cluster
from jaxpar.planner.layout import Layout
from jaxpar.planner.links import Span, bus_bandwidth, collective_seconds, message_seconds, span

ORDER = ("data", "pipe", "tensor")
CLUSTER = parse_cluster("8xh100x8")


@pytest.mark.parametrize(
    ("axes", "layout", "expected"),
    [
        (("tensor",), Layout(8, 1, 8), (8, 1)),
        (("tensor",), Layout(4, 1, 16), (16, 2)),
        (("data",), Layout(8, 1, 8), (8, 8)),
        (("data",), Layout(64, 1, 1), (64, 8)),
        (("data",), Layout(32, 1, 2), (32, 8)),
        (("pipe",), Layout(8, 2, 4), (2, 1)),
        (("pipe",), Layout(4, 4, 4), (4, 2)),
        (("pipe", "tensor"), Layout(2, 8, 4), (32, 4)),
    ],
)
def test_spans(axes, layout, expected):
    assert span(axes, layout, CLUSTER, ORDER) == expected


def test_spans_where_groups_do_not_nest():
    """Racks of 72 and groups of 5 or 48: against a count of the hosts of every device of the first group."""
    for hosts, per_host, layout in (
        (2, 72, Layout(3, 48, 1)),
        (2, 72, Layout(3, 4, 12)),
        (5, 12, Layout(4, 5, 3)),
        (12, 8, Layout(2, 12, 4)),
        (10, 6, Layout(15, 1, 4)),
    ):
        cluster = Cluster(CLUSTER.device, hosts, per_host)
        sizes = {"data": layout.data, "pipe": layout.pipe, "tensor": layout.tensor}
        for axes in (("data",), ("pipe",), ("tensor",), ("pipe", "tensor")):
            group = itertools.product(*(range(size if axis in axes else 1) for axis, size in sizes.items()))
            devices = [(d * layout.pipe + p) * layout.tensor + t for d, p, t in group]
            assert span(axes, layout, cluster, ORDER) == (len(devices), len({at // per_host for at in devices}))


def test_other_systems_put_stages_on_other_hosts():
    assert span(("pipe",), Layout(8, 2, 4), CLUSTER, ("pipe", "data", "tensor")) == (2, 2)


@pytest.mark.parametrize(("hosts", "gigabytes"), [(1, 436), (2, 362), (4, 160), (8, 100), (32, 65)])
def test_bandwidth_is_what_was_measured(hosts: int, gigabytes: float):
    assert bus_bandwidth("all-reduce", Span(8 * hosts, hosts), CLUSTER) == pytest.approx(gigabytes * 1e9)


def test_bandwidth_of_one_device_a_host_is_its_adapter_s():
    group = span(("data",), Layout(8, 1, 8), CLUSTER, ORDER)
    assert bus_bandwidth("all-reduce", group, CLUSTER) == 50e9


def test_a_large_collective_takes_its_bytes_over_the_bandwidth():
    group = span(("tensor",), Layout(8, 1, 8), CLUSTER, ORDER)
    assert collective_seconds("all-reduce", "native", 8e9, group, CLUSTER) == pytest.approx(14e9 / 436e9, rel=0.01)
    gather, reduce = (collective_seconds(op, "native", 8e9, group, CLUSTER) for op in ("all-gather", "reduce-scatter"))
    assert gather == reduce == pytest.approx(7e9 / 250e9, rel=0.01)


def test_a_small_one_takes_its_latency():
    near, far = (span(("tensor",), Layout(1, 1, n), CLUSTER, ORDER) for n in (8, 16))
    assert collective_seconds("all-reduce", "native", 8, near, CLUSTER) == pytest.approx(8.4e-6 + 2 * 7 * 3.4e-6)
    slow = replace(CLUSTER, efficiency=replace(CLUSTER.efficiency, latency=10.0))
    more = collective_seconds("all-reduce", "native", 8, far, slow) - collective_seconds(
        "all-reduce", "native", 8, far, CLUSTER
    )
    assert more == pytest.approx(2 * 9 * 14e-6)


def test_one_device_takes_no_time():
    assert (
        collective_seconds("all-reduce", "native", 1e9, span(("data",), Layout(1, 1, 8), CLUSTER, ORDER), CLUSTER) == 0
    )


def test_own_algorithms_are_ranked_as_by_their_model():
    group = span(("data",), Layout(64, 1, 1), CLUSTER, ORDER)
    of = lambda algorithm, size: collective_seconds("all-reduce", algorithm, size, group, CLUSTER)
    assert of("native", 1e9) < of("ring", 1e9) < of("tree", 1e9)
    assert of("halving_doubling", 1e5) < of("ring", 1e5)


def test_messages():
    slow = replace(CLUSTER, efficiency=replace(CLUSTER.efficiency, hop_seconds=1e-3))
    assert message_seconds(50e6, True, slow) == pytest.approx(1e-3 + 1e-3)
    assert message_seconds(45e6, False, slow) == pytest.approx(1e-3 + 1e-4)
