"""Trees by the names of their leaves, and back."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.names import like, named, nested

WORDS = st.text("abc", min_size=1, max_size=3)
NESTED = st.recursive(
    st.integers(0, 99).map(np.asarray),
    lambda inner: st.dictionaries(WORDS, inner, min_size=1, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


class State(NamedTuple):
    count: Any
    mu: Any


def test_names_are_the_way_to_a_leaf():
    tree = State(1, {"layers": [np.zeros(2), (np.ones(3),)], "empty": {}, "none": None})
    leaves = named(tree)
    assert list(leaves) == ["count", "mu/layers/0", "mu/layers/1/0"]
    assert isinstance(leaves["count"], np.ndarray) and leaves["mu/layers/0"] is tree.mu["layers"][0]


@given(NESTED)
def test_nested_is_the_inverse_for_dicts(tree: dict[str, Any]):
    assert nested(named(tree)) == tree


def test_like_gives_the_structure_whatever_the_order_of_names():
    tree = State(1, {"b": [2, 3], "a": 4})
    leaves = {name: 10 * int(leaf) for name, leaf in named(tree).items()}
    backwards = dict(reversed(leaves.items())) | {"of no use": 5}
    assert like(tree, backwards) == State(10, {"b": [20, 30], "a": 40})
    with pytest.raises(KeyError, match="mu/a"):
        like(tree, {name: leaf for name, leaf in leaves.items() if name != "mu/a"})


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(AssertionError, match="same name"):
        named({"a/b": 1, "a": {"b": 2}})
