"""Trees: how many steps they take, which links they use, and what is no tree."""

import math

import pytest

from jaxpar.collectives import tree_steps
from jaxpar.config import InputError

CHAIN = (-1, 0, 1, 2, 3, 4)
STAR = (2, 2, -1, 2, 2, 2)
TWO_CHILDREN_EACH = (-1, 0, 0, 1, 1, 2, 2)
ODD = (1, 4, 1, 4, -1, 4, 5, 6)  # 4 has the children 5 with 2 steps below it, 1 with 2, and 3 with none


@pytest.mark.parametrize("n", [*range(1, 34), 64, 100])
def test_steps_of_the_usual_tree(n: int):
    exchange = tree_steps(n)
    assert len(exchange.reduce) == len(exchange.share) == math.ceil(math.log2(n))
    assert exchange.blocks == 1


@pytest.mark.parametrize(
    ("parents", "steps"), [(CHAIN, 5), (STAR, 5), (TWO_CHILDREN_EACH, 4), (ODD, 4), ((-1,), 0), ((1, -1), 1)]
)
def test_steps_of_other_trees(parents: tuple[int, ...], steps: int):
    """By hand: the higher child is served first; with the lower one first, ODD would take 5."""
    exchange = tree_steps(len(parents), parents)
    assert len(exchange.reduce) == len(exchange.share) == steps


@pytest.mark.parametrize("parents", [CHAIN, STAR, TWO_CHILDREN_EACH, ODD], ids=str)
def test_nothing_is_sent_but_along_the_tree(parents: tuple[int, ...]):
    """Each link carries the buffer once up and once down."""
    exchange = tree_steps(len(parents), parents)
    up = sorted((send.source, send.target) for step in exchange.reduce for send in step.sends)
    down = sorted((send.target, send.source) for step in exchange.share for send in step.sends)
    assert up == down == sorted((i, parent) for i, parent in enumerate(parents) if parent >= 0)


@pytest.mark.parametrize(
    "parents",
    [(-1, 0), (-1, 0, 0, 0), (-1, 0, -1), (1, 2, 0), (-1, 2, 1), (-1, 0, 3), (-1, -2, 0), (-1, 0, 2)],
    ids=str,
)
def test_what_is_no_tree(parents: tuple[int, ...]):
    """Too short, too long, two roots, none, a loop aside, unknown positions, its own parent."""
    with pytest.raises(InputError, match=r"tree parents \[.*\]: must be the parent of each of 3 .* as \[-1, 0, 0\]"):
        tree_steps(3, parents)
