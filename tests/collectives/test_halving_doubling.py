"""Halving and doubling: who swaps with whom, and how much."""

import pytest

from jaxpar.collectives import halving_doubling_steps


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 64])
def test_powers_of_two(n: int):
    """Halves between nearest neighbours first, then quarters at twice the distance, and so on; and back."""
    exchange = halving_doubling_steps(n)
    pieces = [n >> s for s in range(1, n.bit_length())]
    assert [step.blocks for step in exchange.reduce] == pieces
    assert [step.blocks for step in exchange.share] == pieces[::-1]
    for number, step in enumerate(exchange.reduce):
        assert {(send.source, send.target) for send in step.sends} == {(i, i ^ 1 << number) for i in range(n)}
    assert exchange.scatter_shares == 0


@pytest.mark.parametrize(("n", "p"), [(3, 2), (5, 4), (6, 4), (7, 4), (12, 8), (33, 32)])
def test_others_are_folded_in(n: int, p: int):
    """The last n - p hand all they have to the first, and get the sums back in the end."""
    exchange, inner = halving_doubling_steps(n), halving_doubling_steps(p)
    assert (exchange.reduce[1:], exchange.share[:-1]) == (inner.reduce, inner.share)
    fold, unfold = exchange.reduce[0], exchange.share[-1]
    assert fold.blocks == unfold.blocks == exchange.blocks == p
    assert [(send.source, send.target) for send in fold.sends] == [(p + i, i) for i in range(n - p)]
    assert [(send.source, send.target) for send in unfold.sends] == [(i, p + i) for i in range(n - p)]
