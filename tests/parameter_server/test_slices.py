"""Cutting states over servers: nothing lost, nothing twice, about equal, and put together as it was."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_config import small

from jaxpar.config import InputError, OptimizerConfig
from jaxpar.names import Named, named, nested
from jaxpar.optimizer import make_optimizer
from jaxpar.parameter_server.slices import Slice, assemble, cut, nbytes, parameter_of, take, take_state
from jaxpar.parameter_server.whole import Whole, slices_of

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8)
DTYPES = st.sampled_from(["float32", "float64", "bfloat16"])


def shapes_of(shapes: list[tuple[int, ...]], dtype: str) -> Named:
    return {f"a{i}/weight": jax.ShapeDtypeStruct(shape, dtype) for i, shape in enumerate(shapes)}


@given(SHAPES, DTYPES, st.integers(1, 8), st.booleans())
def test_slices_tile_every_parameter_once(shapes: list[tuple[int, ...]], dtype: str, servers: int, by_rows: bool):
    params = shapes_of(shapes, dtype)
    if servers > len(params):
        with pytest.raises(InputError):
            cut(params, servers, by_rows=by_rows)
        return
    pieces = cut(params, servers, by_rows=by_rows)
    assert len(pieces) == servers and all(pieces)
    rows = [(s.name, row) for slices in pieces for s in slices for row in range(s.start, s.stop)]
    assert rows == [(name, row) for name, leaf in params.items() for row in range(leaf.shape[0])]
    for slices in pieces:
        assert len({s.name for s in slices}) == len(slices)  # states are dicts by name
        for s in slices:
            whole = Slice(s.name, 0, params[s.name].shape[0])
            assert s == whole or (by_rows and len(params[s.name].shape) > 1)


@given(SHAPES, DTYPES, st.integers(1, 8), st.booleans())
def test_servers_hold_about_equally_many_bytes(shapes: list[tuple[int, ...]], dtype: str, servers: int, by_rows: bool):
    """Each of a server's two ends is at the place next to a multiple of the mean, so half a piece away at the most."""
    params = shapes_of(shapes, dtype)
    servers = min(servers, len(params))
    row_bytes = {n: nbytes(p) // (p.shape[0] if by_rows and len(p.shape) > 1 else 1) for n, p in params.items()}
    mean, largest = sum(map(nbytes, params.values())) / servers, max(row_bytes.values())
    for slices in cut(params, servers, by_rows=by_rows):
        held = sum(nbytes(params[s.name]) // params[s.name].shape[0] * (s.stop - s.start) for s in slices)
        assert abs(held - mean) <= largest


def test_a_large_embedding_is_cut_into_even_parts():
    params = shapes_of([(50_000, 16), (16,), (4, 16, 16)], "float32")
    held = [
        sum((s.stop - s.start) * 64 for s in slices if s.name == "a0/weight") for slices in cut(params, 3, by_rows=True)
    ]
    mean = sum(map(nbytes, params.values())) / 3
    assert held[:2] == pytest.approx([mean] * 2, abs=64) and sum(held) == 50_000 * 64


def test_more_servers_than_parameters_are_refused():
    with pytest.raises(InputError) as refused:
        cut(shapes_of([(4, 4), (4,)], "float32"), 3, by_rows=True)
    assert "parameter_server.servers 3 ≤ 2, the number of the model's parameter arrays, does not hold" in str(
        refused.value
    )
    assert "Use servers 2 or less" in str(refused.value)
    assert len(cut(shapes_of([(4, 4), (4,)], "float32"), 2, by_rows=True)) == 2


MODEL = st.fixed_dictionaries(
    {"L": st.integers(1, 4), "D": st.integers(1, 5), "F": st.integers(1, 6), "V": st.integers(1, 12)}
)
OPTIMIZERS = {
    "adamw": {"clip_norm": 1.0, "weight_decay": 0.1},
    "lion": {},
    "muon": {"momentum": 0.9},
    "sgd": {"momentum": 0.9},
    "adafactor": {},
}


def make_params(L: int, D: int, F: int, V: int) -> Named:
    """Named like a model's; `blocks/norm` ends like `norm`."""
    shapes = {
        "blocks/mlp/down/weight": (L, F, D),
        "blocks/mlp/up/bias": (L, F),
        "blocks/norm/scale": (L, D),
        "embedding/weight": (V, D),
        "norm/scale": (D,),
    }
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def check_round_trip(optimizer: str, params: Named, servers: int) -> None:
    section = OptimizerConfig.model_validate({"name": optimizer, "learning_rate": 0.1, **OPTIMIZERS[optimizer]})
    tx = make_optimizer(section, lambda count: 0.1)
    random = np.random.default_rng(1)
    shapes = named(jax.eval_shape(tx.init, nested(params)))
    state = {name: np.asarray(random.normal(size=s.shape) * 9).astype(s.dtype) for name, s in shapes.items()}
    slices = cut(params, servers, by_rows=optimizer != "adafactor")
    taken = [(take(params, s), take_state(state, params, s)) for s in slices]
    for owned, held in taken:  # a server finds in it all that its own optimizer wants, in its shape
        wanted = named(jax.eval_shape(tx.init, nested(owned)))
        assert {n: (leaf.shape, leaf.dtype) for n, leaf in wanted.items()} == {
            n: (held[n].shape, held[n].dtype) for n in wanted
        }
    backwards = list(zip(slices, taken, strict=True))[::-1]  # whatever order they come in
    for whole, index in ((params, 0), (state, 1)):
        shapes = {n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for n, leaf in whole.items()}
        again = assemble(shapes, params, [(s, held[index]) for s, held in backwards])
        assert again.keys() == whole.keys()
        assert all(again[n].dtype == whole[n].dtype and np.array_equal(again[n], whole[n]) for n in whole)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=12, deadline=None)
@given(sizes=MODEL, servers=st.integers(1, 5))
def test_what_is_taken_apart_is_put_together_again(optimizer: str, sizes: dict[str, int], servers: int):
    check_round_trip(optimizer, make_params(**sizes), servers)


@pytest.mark.parametrize("servers", [2, 4])
def test_factored_statistics_are_put_together_again(servers: int):
    """Adafactor keeps row and column sums of matrices with both dims ≥ 128, here as many as there are rows."""
    check_round_trip("adafactor", make_params(L=128, D=128, F=128, V=130), servers)


@pytest.mark.parametrize(("optimizer", "want"), [("adafactor", [[3], [0]]), ("adamw", [[2], [1, 0]])])
def test_servers_know_which_of_their_rows_are_padding(optimizer: str, want: list[list[int]]):
    """Of 12 rows of a table 3 are padding; a cut between rows falls before the last of them."""
    config = small(optimizer__name=optimizer, parameter_server__servers=2)
    params = {"embedding/weight": np.zeros((12, 4)), "blocks/mlp/up/weight": np.zeros((5, 8))}
    parts = slices_of(config, params, {"embedding/weight": 3})
    assert [[s.padding for s in part] for part in parts] == want
    assert all(s.padding == 0 for part in slices_of(config, params) for s in part)
    whole = Whole(config)
    found = {name: sum(s.padding for part in whole.slices for s in part if s.name == name) for name in whole.params}
    assert {name: rows for name, rows in found.items() if rows} == whole.program.padding != {}


def test_a_leaf_belongs_to_the_longest_name_that_it_ends_with():
    params: dict[str, Any] = dict.fromkeys(("norm/scale", "blocks/norm/scale"))
    found = {
        "norm/scale": "norm/scale",
        "1/mu/norm/scale": "norm/scale",
        "1/mu/blocks/norm/scale": "blocks/norm/scale",
        "1/count": None,
        "1/mu/other_norm/scale": None,
    }
    assert {name: parameter_of(name, params) for name in found} == found
