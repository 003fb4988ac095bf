"""The feed-forward in block view against global view, and global view against its formula."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.layers import ParallelMLP
from jaxpar.layers.mlp import ACTIVATIONS as LAYERS_ACTIVATIONS
from jaxpar.mesh import make_mesh
from tests.layers.both_views import MESHES, B, D, T, assert_same, compare_views, numbers, random_params

F = 12
KINDS = {
    "swiglu": {"activation": "silu", "gated": True, "bias": False},
    "swiglu with biases": {"activation": "silu", "gated": True, "bias": True},
    "gelu": {"activation": "gelu", "gated": False, "bias": True},
}
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_new": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}
"""The formulas of Hugging Face's `ACT2FN`."""


def make(sequence_parallel: bool, **options: Any) -> ParallelMLP:
    return ParallelMLP(D, F, sequence_parallel=sequence_parallel, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence_parallel"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_views(sizes: tuple[int, ...], sequence_parallel: bool, kind: str):
    tokens = P("data", "tensor" if sequence_parallel else None)
    compare_views(
        lambda split: make(split, **KINDS[kind]),
        numbers(B, T, D),
        make_mesh(*sizes),
        sequence_parallel=sequence_parallel,
        x_spec=tokens,
        y_spec=tokens,
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_the_formula(activation: str, gated: bool):
    layer = make(False, activation=activation, gated=gated, bias=True)
    params = random_params(layer)
    linear = lambda name, x: x @ params[name]["weight"] + params[name]["bias"]
    x = numbers(B, T, D)
    act = ACTIVATIONS[activation]
    hidden = act(linear("gate", x)) * linear("up", x) if gated else act(linear("up", x))
    assert_same(nnx.merge(nnx.graphdef(layer), params)(x), linear("down", hidden))


def test_the_derivative_of_gelu():
    """Written out in the layer: against central differences of the formula, and JAX's own in bfloat16."""
    x = np.linspace(-4, 4, 41)
    step = 1e-5
    gelu = ACTIVATIONS["gelu"]
    want = (gelu(x + step) - gelu(x - step)) / (2 * step)
    got = jax.vmap(jax.grad(LAYERS_ACTIVATIONS["gelu"]))(x)
    # The step squared times a third derivative below 1, and rounding divided by the step.
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)
    low = jnp.asarray(x, jnp.bfloat16)
    own = jax.vmap(jax.grad(lambda x: jax.nn.gelu(x, approximate=False)))(low)
    got = jax.vmap(jax.grad(LAYERS_ACTIVATIONS["gelu"]))(low)
    assert got.dtype == jnp.bfloat16
    # Three roundings to 8 bits of numbers up to 1.2.
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(own, np.float32), rtol=0, atol=3 * 2**-8)


def test_initial_weights():
    """`out_init` is of `down` alone, and no two projections are the same."""
    layer = make(False, out_init=nnx.initializers.constant(3.0))
    np.testing.assert_array_equal(layer.down.weight[...], 3.0)
    assert layer.gate is not None and not np.any(layer.gate.weight[...] == layer.up.weight[...])
    # 120 draws with standard deviation 0.02: within 5 standard errors, 0.02/√240 each.
    assert abs(np.std(layer.up.weight[...]) - 0.02) < 5 * 0.02 / math.sqrt(2 * layer.up.weight.size)
    assert jax.tree.structure(nnx.to_pure_dict(nnx.state(make(True)))) == jax.tree.structure(
        nnx.to_pure_dict(nnx.state(make(False)))
    )
