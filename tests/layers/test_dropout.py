"""Dropout: a fixed share, the mean kept, and the same mask whatever the layout."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import axis_index
from jaxpar.layers import dropout
from jaxpar.layers.dropout import fold_in
from jaxpar.mesh import make_mesh

B, T, D = 6, 8, 50
RATE = 0.3


def keys(rows: jax.Array) -> jax.Array:
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(5), row))(rows)


def ones(dtype: type = np.float64) -> np.ndarray:
    return np.ones((B, T, D), dtype)


def on_one_device() -> np.ndarray:
    return np.asarray(dropout(jnp.asarray(ones()), keys(jnp.arange(B)), RATE))


def test_the_share_and_the_mean():
    y = on_one_device()
    kept = y != 0
    np.testing.assert_allclose(y[kept], 1 / (1 - RATE), rtol=1e-15)
    # 2400 draws: within 5 standard errors.
    standard_error = math.sqrt(RATE * (1 - RATE) / y.size)
    assert abs(kept.mean() - (1 - RATE)) < 5 * standard_error
    assert abs(y.mean() - 1) < 5 * standard_error / (1 - RATE)


def test_every_example_and_token_has_its_own_mask():
    kept = (on_one_device() != 0).reshape(B * T, D)
    assert len({mask.tobytes() for mask in kept}) == B * T


def test_the_gradient_is_the_mask():
    y, backward = jax.vjp(lambda x: dropout(x, keys(jnp.arange(B)), RATE), ones())
    np.testing.assert_array_equal(backward(ones())[0], y)


@pytest.mark.parametrize("sizes", [(1, 1, 4), (2, 1, 4), (6, 1, 1), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence_parallel"])
def test_every_layout_has_the_same_mask(sizes: tuple[int, ...], sequence_parallel: bool):
    mesh = make_mesh(*sizes)

    def block(x: jax.Array) -> jax.Array:
        rows = axis_index("data") * x.shape[0] + jnp.arange(x.shape[0])
        return dropout(x, keys(rows), RATE, sequence_parallel=sequence_parallel)

    spec = P("data", "tensor" if sequence_parallel else None)
    got = jax.jit(jax.shard_map(block, mesh=mesh, in_specs=spec, out_specs=spec))(ones())
    np.testing.assert_array_equal(got, on_one_device())


def test_nothing_without_keys_or_rate():
    x = jnp.asarray(ones())
    assert dropout(x, None, RATE) is x
    assert dropout(x, keys(jnp.arange(B)), 0.0) is x


def test_the_dtype_stays():
    assert dropout(jnp.asarray(ones(), jnp.bfloat16), keys(jnp.arange(B)), RATE).dtype == jnp.bfloat16


def test_fold_in_makes_new_keys_for_every_example():
    assert fold_in(None, 3) is None
    before = keys(jnp.arange(B))
    made = [fold_in(before, 0), fold_in(before, 1), before]
    data = np.concatenate([jax.random.key_data(k) for k in made if k is not None])
    assert len({k.tobytes() for k in data}) == 3 * B
