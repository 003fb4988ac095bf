"""Run one layer in block view on a mesh and in global view on one device, and compare all numbers.

The global view's own numbers are compared with plain numpy formulas in each layer's test.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.layers import specs

# float64 everywhere; sums of at most a few hundred products, added in another order: about 1e-15 is seen.
TOLERANCE = 1e-12
MESHES = [(2, 1, 4), (1, 2, 2)]
"""The tensor axis is 4 and 2; once beside a data axis, once beside a pipe axis."""
B, T, D = 6, 8, 10


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def random_params(layer: nnx.Module, seed: int = 0) -> dict[str, Any]:
    """Random float64 values for all parameters, biases and scales included; none is 0 or 1 as at the start."""
    random = np.random.default_rng(seed)
    shapes = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    return jax.tree.map(lambda p: 0.4 * random.normal(size=p.shape), shapes)


def call_layer(layer: Any, x: jax.Array) -> jax.Array:
    return layer(x)


def with_gradients(layer: nnx.Module, call: Callable[[Any, jax.Array], jax.Array]) -> Callable[..., Any]:
    """`(params, x, w) -> (y, gradients of params, gradient of x)` of `call` for the cotangent `w` of y.

    Integers, such as tokens, have no gradient; it is given as None.
    """
    graph = nnx.graphdef(layer)

    def run(params: dict[str, Any], x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any, Any]:
        if np.issubdtype(x.dtype, np.integer):
            y, backward = jax.vjp(lambda params: call(nnx.merge(graph, params), x), params)
            return y, *backward(w), None
        y, backward = jax.vjp(lambda params, x: call(nnx.merge(graph, params), x), params, x)
        return y, *backward(w)

    return run


def real(spec: P, mesh: Mesh) -> P:
    """The spec without axes of size 1, as `specs` gives them for parameters."""
    names = [(axes,) if isinstance(axes, str) else axes or () for axes in spec]
    return P(*[tuple(a for a in axes if mesh.shape[a] > 1) or None for axes in names])


def compare_views(
    make: Callable[[bool], nnx.Module],
    x: np.ndarray,
    mesh: Mesh,
    *,
    sequence_parallel: bool,
    x_spec: P,
    y_spec: P,
    call: Callable[[Any, jax.Array], jax.Array] = call_layer,
) -> None:
    """Value and all gradients on the mesh, against the layer without sequence parallelism on one device.

    Args:
        make: builds the layer, with or without sequence parallelism.
        x: the whole input.
        mesh: for block view.
        sequence_parallel: of the layer in block view.
        x_spec: how the input is split in block view.
        y_spec: how the output is.
        call: what to do with the layer.
    """
    plain = make(False)
    params = random_params(plain)
    w = numbers(*jax.eval_shape(lambda params, x: call(nnx.merge(nnx.graphdef(plain), params), x), params, x).shape)
    want = jax.jit(with_gradients(plain, call))(params, x, w)
    layer = make(sequence_parallel)
    x_spec, y_spec = real(x_spec, mesh), real(y_spec, mesh)
    param_specs = specs(layer, mesh)
    block = jax.shard_map(
        with_gradients(layer, call),
        mesh=mesh,
        in_specs=(param_specs, x_spec, y_spec),
        out_specs=(y_spec, param_specs, P() if want[2] is None else x_spec),
    )
    assert_same(jax.jit(block)(params, x, w), want)


def assert_same(got: Any, want: Any) -> None:
    """Trees of equal structure whose largest difference is `TOLERANCE` of the largest number (or of 1)."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        scale = max(1.0, np.abs(np.where(np.isfinite(b), b, 0)).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * scale, err_msg=jax.tree_util.keystr(path))
