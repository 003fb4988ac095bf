"""Rings and trees against brute force, rings that a search has to find, and matrices that are none."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.collectives import bottleneck
from jaxpar.collectives.bottleneck import exact_ring, searched_ring, spanning_tree
from jaxpar.collectives.ring_order import read_links, ring_order
from jaxpar.config import InputError

few = settings(max_examples=60, deadline=None)
matrices = st.integers(2, 7).flatmap(  # few different bandwidths, so that there are ties and broken links
    lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=n, max_size=n)
)


def slowest_of_rings(links: np.ndarray, rings: np.ndarray) -> np.ndarray:
    return links[rings, np.roll(rings, -1, axis=1)].min(axis=1)


def all_rings(n: int) -> np.ndarray:
    return np.array([(0, *rest) for rest in itertools.permutations(range(1, n))])


def without_diagonal(rows: list[list[int]]) -> np.ndarray:
    links = np.array(rows, float)
    np.fill_diagonal(links, 0)
    return links


def parts_above(both: np.ndarray, bandwidth: float) -> list[list[int]]:
    """By multiplying reachability out; `bandwidth` > 0."""
    reach = np.linalg.matrix_power((both >= bandwidth) + np.eye(len(both)), len(both)) > 0
    return sorted({tuple(np.flatnonzero(row).tolist()) for row in reach})


@few
@given(matrices)
def test_the_best_ring_or_else_the_best_tree(rows: list[list[int]]):
    links = without_diagonal(rows)
    n, both = len(links), np.minimum(links, links.T)
    best = slowest_of_rings(links, all_rings(n)).max()
    if best == 0 and len(parts := parts_above(both, 1)) > 1:
        with pytest.raises(InputError) as error:
            ring_order(rows)
        assert f"joins these parts: {'; '.join(', '.join(map(str, part)) for part in parts)}." in str(error.value)
        return
    route = ring_order(rows)
    assert links[route.slowest_link] == route.slowest
    if best > 0:
        assert route.parents is None and route.order is not None
        assert sorted(route.order) == list(range(n)) and route.order[0] == 0
        assert route.slowest == slowest_of_rings(links, np.array([route.order]))[0] == best
        assert route.how == "exact: no ring has a faster slowest link"
    else:
        assert route.order is None and route.parents is not None
        assert route.slowest == max(b for b in range(1, 5) if len(parts_above(both, b)) == 1)
        assert route.slowest == min(both[i, parent] for i, parent in enumerate(route.parents) if parent >= 0)
        assert depth(route.parents) < n
        assert route.how.startswith("no ring passes through all devices: the tree")


def depth(parents) -> int:
    """Links from the lowest device up to the root; fails where it is no tree."""
    assert list(parents).count(-1) == 1

    def above(i: int, seen: tuple[int, ...] = ()) -> int:
        assert i not in seen
        return 0 if parents[i] == -1 else 1 + above(parents[i], (*seen, i))

    return max(above(i) for i in range(len(parents)))


@pytest.mark.parametrize("per_host", [1, 3])
@pytest.mark.parametrize("n", [2, 6, 12, 18])
def test_where_all_links_are_equal_the_order_stays(n: int, per_host: int):
    if n % per_host == 0:
        assert ring_order(np.full((n, n), 7.0), per_host).order == tuple(range(n))


def test_one_and_two_devices():
    assert ring_order([[0]]).order == (0,)
    assert ring_order([[5]]).slowest_link is None
    route = ring_order([[0, 3], [2, 0]])
    assert (route.order, route.slowest, route.slowest_link) == ((0, 1), 2, (1, 0))


def test_links_that_work_in_one_direction():
    links = np.zeros((5, 5))
    links[[0, 3, 1, 4, 2], [3, 1, 4, 2, 0]] = 1
    assert ring_order(links).order == (0, 3, 1, 4, 2)
    links[2, 0] = 0
    with pytest.raises(InputError, match=r"joins these parts: 0; 1; 2; 3; 4\."):
        ring_order(links)  # all that is left is one direction of a path


@few
@given(st.integers(0, 10_000), st.sampled_from([(2, 2), (3, 2), (2, 3)]))
def test_hosts_first(seed: int, sizes: tuple[int, int]):
    """Each host once; the order of hosts is the best, and the way through the devices the best for it."""
    hosts, g = sizes
    n = hosts * g
    links = without_diagonal(np.random.default_rng(seed).integers(1, 6, (n, n)))
    order = np.array(ring_order(links, per_host=g).order)
    assert sorted(order) == list(range(n))
    once = lambda ring: [host for host, _ in itertools.groupby(np.array(ring) // g)]
    assert len(once(order)) == hosts  # it begins with the first device of a host
    between = links.reshape(hosts, g, hosts, g).max(axis=(1, 3))
    np.fill_diagonal(between, 0)
    best = slowest_of_rings(between, all_rings(hosts)).max()
    assert slowest_of_rings(between, np.array([once(order)]))[0] == best
    same = [ring for ring in itertools.permutations(range(n)) if ring[0] // g == 0 and once(ring) == once(order)]
    assert slowest_of_rings(links, order[None])[0] == slowest_of_rings(links, np.array(same)).max()


def test_hosts_are_left_and_entered_by_their_fastest_links():
    """Two hosts of three whose network adapters hang at devices 1 and 2, and at 3 and 5."""
    links = np.ones((6, 6))
    links[:3, :3] = links[3:, 3:] = 100
    links[1, 3] = links[5, 2] = 10
    route = ring_order(links, per_host=3)
    assert (route.order, route.slowest) == ((2, 0, 1, 3, 4, 5), 10)
    assert route.how == "hosts first, each once; exact: no order of hosts has a faster slowest link"


def test_many_hosts_are_searched():
    """14 hosts whose devices are joined by faster links than the hosts are."""
    links = np.ones((28, 28)) + np.kron(np.eye(14), np.full((2, 2), 9.0))
    route = ring_order(links, per_host=2)
    assert route.order == tuple(range(28))
    links[:10, 10:12] = links[12:, 10:12] = 0.5
    route = ring_order(links, per_host=2)
    assert sorted(route.order) == list(range(28)) and route.slowest == 0.5
    assert route.how == "hosts first, each once; search: no order of hosts has a faster slowest link"


def test_the_diagonal_is_not_read():
    links = np.ones((14, 14))
    np.fill_diagonal(links, np.nan)
    assert ring_order(links).how == "search: no ring has a faster slowest link"


def test_a_ring_that_comes_back_to_a_host_where_no_other_is_left():
    """0 and 1 share a host, but their link is broken."""
    links = np.ones((4, 4))
    links[0, 1] = links[1, 0] = 0
    route = ring_order(links, per_host=2)
    assert route.order is not None and slowest_of_rings(links, np.array([route.order]))[0] == 1
    assert route.how == "exact: no ring has a faster slowest link"


def grid(rows: int, columns: int) -> np.ndarray:
    """Links to the neighbours above, below, left and right."""
    at = np.array([(i, j) for i in range(rows) for j in range(columns)])
    return (np.abs(at[:, None] - at[None]).sum(axis=2) == 1).astype(float)


def hidden(n: int, extra: int, seed: int) -> np.ndarray:
    """Slow links, `extra` fast ones from each device, and a ring of fast ones in random order."""
    rng = np.random.default_rng(seed)
    links, ring = np.full((n, n), 1.0), rng.permutation(n)
    links[ring, np.roll(ring, -1)] = 9.0
    for i in range(n):
        links[i, rng.choice(n, extra, replace=False)] = 9.0
    np.fill_diagonal(links, 0)
    return links


@pytest.mark.parametrize(
    "links",
    [grid(4, 4), grid(4, 5), grid(6, 7), hidden(20, 3, seed=1), hidden(40, 5, seed=2), hidden(128, 8, seed=3)],
    ids=["4 × 4", "4 × 5", "6 × 7", "20 hidden", "40 hidden", "128 hidden"],
)
def test_the_search_finds_rings_that_are_there(links: np.ndarray):
    route = ring_order(links)
    assert sorted(route.order) == list(range(len(links)))
    assert route.slowest == slowest_of_rings(links, np.array([route.order]))[0] == links.max()
    assert route.how == "search: no ring has a faster slowest link"
    assert route == ring_order(links)  # every process finds the same


def test_the_search_against_the_exact_answer():
    found = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        links = without_diagonal(rng.random((10, 10)))
        if seed % 2:
            links = np.maximum(links, links.T)
        best = slowest_of_rings(links, np.array([exact_ring(links)]))[0]
        ring, certain = searched_ring(links)
        got = slowest_of_rings(links, np.array([ring]))[0]
        assert got == best if certain else got <= best
        found.append(got / best)
    assert min(found) > 0.9 and np.mean(np.array(found) == 1) > 0.9


def test_every_exchange_removes_the_slowest_link():
    """Pieces that are turned round use their links backwards, of which none may be as slow."""
    changed = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        links, ring = without_diagonal(rng.integers(1, 30, (9, 9))), rng.permutation(9)
        new, moves = bottleneck._exchanged(links, ring, 1)
        assert sorted(new) == list(range(9)) and moves == 0
        (before, many), (after, fewer) = (bottleneck._quality(links, r) for r in (ring, new))
        if (before, many) != (after, fewer):
            assert after > before or (after == before and -fewer == -many - 1)
            changed += 1
    assert changed > 100


def test_no_ring_among_many():
    """An odd number of squares, of which each step changes the colour; and a device with a single link."""
    odd, lonely = grid(3, 5), np.ones((14, 14))
    lonely[13] = lonely[:, 13] = 0
    lonely[13, 6] = lonely[6, 13] = 1
    assert ring_order(odd).how.startswith("no ring was found through all devices: the tree")
    route = ring_order(lonely)
    assert route.how.startswith("no ring passes through all devices: the tree")
    assert route.parents is not None and (route.parents[13] == 6 or route.parents[6] == 13)


@few
@given(st.integers(0, 10_000))
def test_the_tree_of_the_fastest_slowest_link(seed: int):
    rng = np.random.default_rng(seed)
    both = np.triu(rng.integers(1, 5, (7, 7)) * (rng.random((7, 7)) < 0.5), 1).astype(float)
    both += both.T
    parents, bandwidth = spanning_tree(both)
    assert bandwidth == max(b for b in range(5) if b == 0 or len(parts_above(both, b)) == 1)
    if bandwidth:
        assert depth(parents) < 7
        assert bandwidth == min(both[i, parent] for i, parent in enumerate(parents) if parent >= 0)


@pytest.mark.parametrize(("n", "rounds"), [(2, 1), (5, 3), (8, 3), (16, 4)])
def test_a_tree_is_low_where_links_allow_it(n: int, rounds: int):
    """In `rounds` rounds, in each of which every device that is reached serves one child, 2^rounds are reached."""
    parents, bandwidth = spanning_tree(np.full((n, n), 3.0) - 3 * np.eye(n))
    children = [parents.count(i) for i in range(n)]
    assert bandwidth == 3 and depth(parents) <= rounds and max(children) <= rounds


def test_a_chain_has_its_root_inside():
    links = np.diag(np.ones(8), 1) + np.diag(np.ones(8), -1)
    parents, _ = spanning_tree(links)
    assert depth(parents) < 8


@pytest.mark.parametrize(
    ("bandwidth", "per_host", "said"),
    [
        ([[0, 1, 2], [1, 0, 2]], 1, "square matrix, but the shape is [2, 3]"),
        ([[0, 1], [1]], 1, "rows of equal length"),
        ([[0, "fast"], [1, 0]], 1, "a matrix of numbers"),
        ([], 1, "square matrix, but the shape is [0]"),
        ([1, 2], 1, "square matrix, but the shape is [2]"),
        ([[0, -1], [1, 0]], 1, "the bandwidth from 0 to 1 is -1, must be a finite number, 0 (broken) or above."),
        ([[0, 1, 1], [1, 0, np.nan], [np.inf, 1, 0]], 1, "from 1 to 2 is nan, must be a finite number, 0 (broken)"),
        ([[0, 1, 1], [1, 0, np.nan], [np.inf, 1, 0]], 1, "and 1 others are wrong, too"),
        (np.ones((4, 4)), 3, "per_host = 3 must divide the 4 devices"),
        (np.ones((4, 4)), 0, "per_host = 0 must divide"),
    ],
)
def test_bad_matrices(bandwidth, per_host: int, said: str):
    with pytest.raises(InputError) as error:
        ring_order(bandwidth, per_host)
    assert said in str(error.value)


def test_reading_a_file_of_links(tmp_path: Path):
    path = tmp_path / "links.json"
    path.write_text(json.dumps([[0, 1.5], [2, 0]]))
    assert read_links(path, 2).tolist() == [[0, 1.5], [2, 0]]
    for text, said in (
        ("[[0, 1], [1, 0]", "links.json: "),
        ('{"a": 1}', "a matrix of numbers"),
        ("[[0, 1]]", "square matrix"),
        ("[[0, 1, 1], [1, 0, 1], [1, 1, 0]]", "has 3 rows, but mesh.data = 2"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=r"grad_reduce\.links = ") as error:
            read_links(path, 2)
        assert said in str(error.value)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_links(tmp_path / "missing.json", 2)
