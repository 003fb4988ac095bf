"""The ring: its order, its halves by themselves, and what it refuses."""

import numpy as np
import pytest
import replicas

from jaxpar.collectives import ring_all_gather, ring_reduce_scatter, ring_steps
from jaxpar.config import InputError

ORDERS = [None, (3, 0, 4, 1, 2)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_everything_goes_to_the_next_in_the_ring(order: tuple[int, ...] | None):
    exchange = ring_steps(5, order)
    ring = order or tuple(range(5))
    links = set(zip(ring, (*ring[1:], ring[0]), strict=True))
    for step in (*exchange.reduce, *exchange.share):
        assert {(send.source, send.target) for send in step.sends} == links


@pytest.mark.parametrize("n", range(1, 9))
def test_steps_and_blocks(n: int):
    exchange = ring_steps(n)
    assert exchange.blocks == n
    assert [step.blocks for step in exchange.reduce] == [step.blocks for step in exchange.share] == [1] * (n - 1)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_reduce_scatter_and_all_gather(order: tuple[int, ...] | None):
    """Position i has row i of the sum, and of what is gathered, whatever the order."""
    held = replicas.random((5, 5, 3), "float64")
    rows = replicas.each_device(lambda x: ring_reduce_scatter(x, "data", order), held)
    np.testing.assert_allclose(rows, held.sum(0), rtol=0, atol=5 * 2**-53 * np.abs(held).sum(0).max())
    whole = replicas.each_device(lambda x: ring_all_gather(x, "data", order), held[:, 0])
    np.testing.assert_array_equal(whole, np.broadcast_to(held[:, 0], (5, 5, 3)))


def test_on_the_wire_in_bfloat16():
    held = replicas.random((4, 4, 3), "float32")
    rounded = held.astype("bfloat16").astype("float32")
    whole = replicas.each_device(lambda x: ring_all_gather(x, "data", wire_dtype="bfloat16"), held[:, 0])
    np.testing.assert_array_equal(whole, np.broadcast_to(rounded[:, 0], (4, 4, 3)))
    rows = replicas.each_device(lambda x: ring_reduce_scatter(x, "data", wire_dtype="bfloat16"), held)
    # Position i adds its own, not rounded, to what has come around; each of the others was rounded up to 3 times.
    assert (np.abs(rows - held.sum(0)) <= 3 * 2**-8 * np.abs(held).sum(0)).all()
    assert (rows != held.sum(0)).all()


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (1, 2, 3), (0, 1, 2, 3), ()])
def test_an_order_that_is_no_permutation(order: tuple[int, ...]):
    with pytest.raises(
        InputError, match=r"ring order \[.*\]: must have each position from 0 to 2 once, as \[0, 1, 2\]"
    ):
        ring_steps(3, order)
