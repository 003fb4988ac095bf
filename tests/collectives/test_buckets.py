"""Buckets: what shares one, and that everything comes back to its place."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpar.collectives.buckets import fill, in_buckets
from jaxpar.mesh import make_mesh


def test_buckets_are_filled_in_order():
    """Of 40 bytes; `x` has 8 bytes an element."""
    sizes = [3, 2, 1, 9, 1, 4, 0]
    assert fill([jnp.ones(size) for size in sizes], 40) == [[0, 1], [2], [3], [4, 5, 6]]


def test_no_bucket_has_two_dtypes():
    arrays = [jnp.ones(2, dtype) for dtype in ("float32", "bfloat16", "int32", "float32", "bfloat16")]
    assert fill(arrays, 1000) == [[0, 3], [1, 4], [2]]


def test_no_bucket_varies_over_two_sets_of_axes():
    found = []

    def block(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        found.append(fill([a, b, c], 1000))
        return a

    specs = (P("data"), P(("data", "tensor")), P("data"))
    jax.shard_map(block, mesh=make_mesh(data=2, tensor=2), in_specs=specs, out_specs=P("data"))(*[jnp.ones(4)] * 3)
    assert found == [[[0, 2], [1]]]


def test_results_come_back_to_their_arrays():
    arrays = [np.full((2, size), value, dtype) for size, value, dtype in [(3, 1, "f4"), (2, 2, "f8"), (4, 3, "f4")]]
    joined = []

    def total(x: jax.Array) -> jax.Array:
        joined.append(x.shape)
        return x.sum(0)

    results = in_buckets(total, [jnp.asarray(x) for x in arrays], 1000)
    assert joined == [(2, 7), (2, 2)]
    for x, result in zip(arrays, results, strict=True):
        assert result.dtype == x.dtype
        np.testing.assert_array_equal(result, x.sum(0))
    assert in_buckets(total, [], 1000) == []
