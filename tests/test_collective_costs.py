"""The model against what NCCL's own model and measurements are known to say, and a measured table that overrides it."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxpar.collective_costs import ALGORITHMS, Group, choose, read_measured, seconds
from jaxpar.collective_costs.links import NVLINK_SHARE, rates
from jaxpar.collective_costs.nccl import nccl_kind
from jaxpar.config import InputError
from jaxpar.hardware import DEVICES

H100 = DEVICES["H100"]
MB = 2**20
SIZES = [2**k for k in range(10, 35)]
CHIPS = sorted(DEVICES)


def nccl(buffer_bytes: float, hosts: int) -> str:
    return nccl_kind("all-reduce", buffer_bytes, Group(8 * hosts, 8), H100)[0]


def test_nccl_takes_the_ring_on_one_host_at_every_size():
    assert {nccl(size, hosts=1) for size in SIZES} == {"ring"}


@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_nccl_goes_over_to_the_ring_between_8_and_64_mb_on_few_hosts(hosts: int):
    assert {nccl(size, hosts) for size in SIZES if size <= 8 * MB} == {"tree"}
    # On 4 hosts the tree is ahead once more, by a hair, around 128 MB, where its correction steps up.
    assert {nccl(size, hosts) for size in SIZES if size >= 64 * MB and size != 128 * MB} == {"ring"}


@pytest.mark.parametrize("hosts", [8, 16, 64])
def test_nccl_goes_over_to_the_ring_above_1_gb_on_many_hosts(hosts: int):
    assert {nccl(size, hosts) for size in SIZES if size <= 1024 * MB} == {"tree"}
    assert nccl(16 * 1024 * MB, hosts) == "ring"


@pytest.mark.parametrize(
    ("op", "buffer_bytes", "hosts", "bus_gigabytes", "tolerance"),
    [
        ("all-reduce", MB, 1, 66, 0.02),  # what its own model says; 40 is measured
        ("all-reduce", 16 * 1024 * MB, 1, 368, 0.02),  # NCCL's ring, measured on 8 H200
        ("all-gather", 16 * 1024 * MB, 1, 361, 0.03),
        ("reduce-scatter", 16 * 1024 * MB, 1, 363, 0.03),
        # Medians over clusters of so many hosts.
        ("all-reduce", 16 * 1024 * MB, 2, 362, 0.02),
        ("all-reduce", 16 * 1024 * MB, 8, 100, 0.02),
        ("all-reduce", 64 * 1024 * MB, 64, 33, 0.02),
        ("all-gather", 16 * 1024 * MB, 4, 119, 0.02),
        ("reduce-scatter", 64 * 1024 * MB, 32, 28, 0.02),
    ],
)
def test_native_reaches_the_bus_bandwidths_that_were_measured(op, buffer_bytes, hosts, bus_gigabytes, tolerance):
    n = 8 * hosts
    moved = (2 if op == "all-reduce" else 1) * (n - 1) / n * buffer_bytes  # as nccl-tests defines the bus bandwidth
    bandwidth = moved / seconds(op, "native", buffer_bytes, Group(n, 8), H100)
    assert bandwidth / 1e9 == pytest.approx(bus_gigabytes, rel=tolerance)


@pytest.mark.parametrize(
    ("op", "n", "per_host", "kind", "latency", "gigabytes_per_second"),
    [  # microseconds and rates of the algorithm, by hand from tuning.cc; the network as measured
        ("all-reduce", 8, 8, ("ring", "LL"), 6.6 + 14 * 0.6, 0.31 * 450 * 8 / 14),
        ("all-reduce", 16, 8, ("tree", "LL"), 6.8 + 2 * (7 * 0.6 + 5), 39 * 0.9 / 2),
        ("all-gather", 16, 8, ("ring", "LL"), 6.6 + 14 * 1 + 2.7, 39 * 16 / 15),
        ("all-reduce", 8, 1, ("tree", "LL"), 6.8 + 2 * 3 * 5, 50 * 100 / 400 * 0.92 / 3.8 * 0.9 / 2),
        ("reduce-scatter", 8, 1, ("ring", "LL"), 6.6 + 7 * 5, 50 * 69 / 400 / 2 * 8 / 7),
    ],
)
def test_small_buffers_by_hand(op, n, per_host, kind, latency, gigabytes_per_second):
    assert nccl_kind(op, 1024, Group(n, per_host), H100) == kind
    microseconds = seconds(op, "native", 1024, Group(n, per_host), H100) * 1e6
    assert microseconds == pytest.approx(latency + 1.024 / gigabytes_per_second, rel=1e-9)


def test_network_shares_lie_between_the_measured_ones():
    two, three, four = (rates("all-reduce", hosts, H100).network for hosts in (2, 3, 4))
    assert two > three > four
    assert three == pytest.approx(two + np.log2(1.5) * (four - two))
    assert rates("all-reduce", 500, H100) == rates("all-reduce", 64, H100)  # no further than was measured


def latency_and_bytes(op, algorithm, buffer_bytes, n, per_host, across) -> tuple[float, float, float]:
    """Microseconds of latency, and bytes through NVLink and through the network, from times at other link rates."""
    group = Group(n, per_host)
    share = rates(op, group.hosts, H100).network / H100.network_bytes_per_second
    time = lambda nvlink, network: seconds(
        op,
        algorithm,
        buffer_bytes,
        group,
        replace(
            H100,
            memory_bytes_per_second=1e30,
            nvlink_bytes_per_second=nvlink / NVLINK_SHARE,
            network_bytes_per_second=network / share,
        ),
        across,
    )
    latency = time(1e30, 1e30)
    return latency * 1e6, time(1.0, 1e30) - latency, time(1e30, 1.0) - latency


NEAR, FAR = 8.4 + 3.4, 8.4 + 14.0
"""Microseconds of a permute inside a host and between hosts."""


@pytest.mark.parametrize(
    ("op", "algorithm", "n", "per_host", "across", "microseconds", "inside", "between"),
    [
        ("all-reduce", "ring", 6, 6, "ring", 10 * NEAR, 2 * 5 / 6, 0),
        ("all-reduce", "ring", 6, 2, "ring", 10 * FAR, 0, 2 * 5 / 6),  # every step waits for the link between hosts
        ("reduce-scatter", "ring", 6, 6, "ring", 5 * NEAR, 5 / 6, 0),
        ("all-gather", "ring", 6, 6, "ring", 5 * NEAR, 5 / 6, 0),
        ("all-reduce", "tree", 8, 8, "ring", 6 * NEAR, 6, 0),
        ("all-reduce", "tree", 5, 5, "ring", 6 * NEAR, 6, 0),
        ("all-reduce", "tree", 16, 4, "ring", 4 * NEAR + 4 * FAR, 4, 4),
        ("all-reduce", "tree", 6, 3, "ring", 6 * FAR, 0, 6),  # 2 and 3 are neighbours on two hosts
        ("reduce-scatter", "tree", 8, 8, "ring", 6 * NEAR, 6, 0),
        ("all-reduce", "halving_doubling", 8, 8, "ring", 6 * NEAR, 2 * 7 / 8, 0),
        ("all-reduce", "halving_doubling", 8, 2, "ring", 2 * NEAR + 4 * FAR, 1, 2 * 3 / 8),
        ("reduce-scatter", "halving_doubling", 8, 8, "ring", 3 * NEAR, 7 / 8, 0),
        ("all-reduce", "halving_doubling", 6, 6, "ring", 6 * NEAR, 2 + 2 * 3 / 4, 0),  # two more steps fold 6 into 4
        ("reduce-scatter", "halving_doubling", 6, 6, "ring", 6 * NEAR, 2 + 2 * 3 / 4, 0),
        ("all-reduce", "hierarchical", 12, 4, "ring", 6 * NEAR + 4 * FAR, 2 * 3 / 4, 2 * 2 / 3 / 4),
        ("all-reduce", "hierarchical", 16, 4, "tree", 6 * NEAR + 4 * FAR, 2 * 3 / 4, 4 / 4),
        ("all-reduce", "hierarchical", 16, 4, "halving_doubling", 6 * NEAR + 4 * FAR, 2 * 3 / 4, 2 * 3 / 4 / 4),
        ("reduce-scatter", "hierarchical", 12, 4, "ring", 3 * NEAR + 2 * FAR, 3 / 4, 2 / 3 / 4),
        ("all-gather", "hierarchical", 12, 4, "ring", 3 * NEAR + 2 * FAR, 3 / 4, 2 / 3 / 4),
        ("all-reduce", "hierarchical", 6, 6, "tree", 10 * NEAR, 2 * 5 / 6, 0),  # one host: a ring
    ],
)
def test_steps_and_bytes_of_our_own(op, algorithm, n, per_host, across, microseconds, inside, between):
    """By formula: latencies add up over the steps, and each link carries its share of the buffer."""
    got = latency_and_bytes(op, algorithm, 1000.0, n, per_host, across)
    assert got == pytest.approx((microseconds, 1000 * inside, 1000 * between), rel=1e-6, abs=1e-3)


def test_summing_costs_memory_traffic():
    """A ring's reduce-scatter takes longer than its all-gather by three memory accesses for each byte that arrives."""
    scatter, gather = (seconds(op, "ring", 8e6, Group(8, 8), H100) for op in ("reduce-scatter", "all-gather"))
    assert scatter - gather == pytest.approx(3 * 7e6 / 3.35e12)


@pytest.mark.parametrize("chip", CHIPS)
def test_larger_buffers_and_more_hosts_never_take_less_time(chip: str):
    for algorithm in ALGORITHMS:
        times = [seconds("all-reduce", algorithm, size, Group(64, 8), DEVICES[chip]) for size in SIZES]
        # Only NCCL's trees step down a little where its correction steps up; that is how it reckons.
        assert all(b > 0.9 * a for a, b in itertools.pairwise(times)), algorithm
        by_hosts = [seconds("all-reduce", algorithm, 64 * MB, Group(8 * N, 8), DEVICES[chip]) for N in (1, 2, 8, 64)]
        assert by_hosts == sorted(by_hosts)
    assert seconds("all-reduce", "ring", MB, Group(1, 1), DEVICES[chip]) == 0


def test_choice_by_the_model():
    choice = choose(64e6, 8, 8, H100)
    assert choice.algorithm == "native"
    assert choice.seconds == seconds("all-reduce", "native", 64e6, Group(8, 8), H100)
    assert choice.reason == (
        "native: 0.36 ms by the model of H100 for an all-reduce of 64 MB among 8 devices, 8 per host; "
        "halving_doubling 0.424 ms, ring 0.519 ms, tree 1.28 ms"
    )
    # With one device on each of many hosts, halving and doubling takes fewer steps than NCCL's ring.
    assert choose(16e6, 64, 1, H100).algorithm == "halving_doubling"
    # Inside hosts first: only that keeps most bytes off the network, where 8 adapters would carry one ring's bytes.
    times = {a: seconds("all-reduce", a, 1e9, Group(64, 8), H100) for a in ALGORITHMS}
    assert times["hierarchical"] < times["ring"] / 5


def test_without_model_and_table_the_choice_is_native():
    choice = choose(1e6, 8, 8, None)
    assert (choice.algorithm, choice.seconds) == ("native", None)
    assert choice.reason == "native: there is no model of this machine, and no measured table"


def row(algorithm: str, buffer_bytes: int, time: float, *, n: int = 4, axis: str = "data") -> dict:
    return {
        "axis": axis,
        "n": n,
        "per_host": n,
        "op": "all-reduce",
        "algorithm": algorithm,
        "bytes": buffer_bytes,
        "seconds": time,
    }


@pytest.fixture
def table_file(tmp_path: Path) -> Path:
    rows = [
        row("native", 4096, 3e-3),
        row("native", 1024, 1e-3),
        row("ring", 1024, 2e-3),
        row("ring", 4096, 2e-3),
        row("tree", 1024, 1e-9, axis="tensor"),
        row("tree", 1024, 1e-9, n=2),
    ]
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_a_measured_table_overrides_the_model(table_file: Path):
    table = read_measured(table_file)
    small, large = choose(1024, 4, 4, H100, table), choose(4096, 4, 4, None, table)
    assert (small.algorithm, small.seconds) == ("native", 1e-3)
    assert large.reason == (
        f"ring: 2 ms as measured in {table_file} for an all-reduce of 0.004096 MB among 4 devices, 4 per host; "
        f"native 3 ms"
    )
    # The tree was measured over another axis and in another group only.
    assert choose(1024, 2, 2, H100, table).algorithm == "tree"
    assert choose(1024, 8, 8, H100, table).reason.startswith("native: 0.015 ms by the model of H100")
    nothing = choose(1024, 8, 8, None, table)
    assert nothing.algorithm == "native"
    assert nothing.reason == (
        f"native: there is no model of this machine, and {table_file} measured no group of 8, 8 per host"
    )


def test_between_measured_sizes_time_follows_the_logarithms(table_file: Path):
    table, group = read_measured(table_file), Group(4, 4)
    at = lambda size: table.seconds("all-reduce", "native", size, group)
    assert at(2048) == pytest.approx((1e-3 * 3e-3) ** 0.5)  # half way in both logarithms
    assert at(1024 * 4**0.25) == pytest.approx(1e-3 * 3**0.25)
    assert at(1024) == at(1) == 1e-3
    assert at(8192) == pytest.approx(6e-3)
    assert table.seconds("all-gather", "native", 1024, group) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not what `jaxpar bench collectives"),
        ("[]", "is not what"),
        ('{"rows": [{"axis": "data"}]}', "is not what"),
        (json.dumps({"rows": [row("ring", 1, 1.0, axis="pipe")]}), "has no measurement over data, only over pipe"),
    ],
)
def test_tables_that_are_none(tmp_path: Path, text: str | None, said: str):
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=r"grad_reduce\.table = ") as error:
        read_measured(path)
    assert said in str(error.value)


def test_devices_that_do_not_fill_hosts():
    with pytest.raises(InputError, match=r"12 devices do not fill hosts of 8: 12 % 8 must be 0"):
        choose(1e6, 12, 8, H100)
    assert Group(4, 8) == Group(4, 4)
