"""Hierarchical: what crosses between hosts, and the cases that are no hierarchy."""

import pytest

from jaxpar.collectives import halving_doubling_steps, hierarchical_steps, ring_steps, tree_steps
from jaxpar.config import InputError

FLAT = [ring_steps, tree_steps, halving_doubling_steps]


@pytest.mark.parametrize("across", FLAT)
@pytest.mark.parametrize(("n", "g"), [(4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (64, 8)])
def test_between_hosts_each_device_sends_a_share(n: int, g: int, across):
    """In one step all links are inside hosts, or all are between devices with the same place on two hosts."""
    exchange, flat = hierarchical_steps(n, g, across), across(n // g)
    inside, between = [], []
    for step in (*exchange.reduce, *exchange.share):
        crossing = {send.source // g != send.target // g for send in step.sends}
        assert len(crossing) == 1
        if crossing == {True}:
            assert all(send.source % g == send.target % g for send in step.sends)
            between.append(step.blocks / exchange.blocks)
        else:
            inside.append(step.blocks / exchange.blocks)
    assert inside == [1 / g] * (2 * (g - 1))
    assert between == pytest.approx([step.blocks / flat.blocks / g for step in (*flat.reduce, *flat.share)])


@pytest.mark.parametrize("across", FLAT)
@pytest.mark.parametrize("n", [1, 5, 8])
def test_one_device_a_host_or_one_host(n: int, across):
    assert hierarchical_steps(n, 1, across) == across(n)
    assert hierarchical_steps(n, n, across) == ring_steps(n)


def test_hosts_of_unequal_size():
    with pytest.raises(InputError, match=r"per_host 3: 8 devices % 3 = 2, must be 0; nearest: 2"):
        hierarchical_steps(8, 3)
    with pytest.raises(InputError, match=r"per_host 16: .* nearest: 8"):
        hierarchical_steps(8, 16)
