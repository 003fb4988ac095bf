"""Column and row parallel layers in block view against global view, and global view against `x @ w + b`."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.layers import ColumnParallelLinear, RowParallelLinear
from jaxpar.mesh import make_mesh
from tests.layers.both_views import MESHES, B, D, T, assert_same, compare_views, numbers, random_params

F = 12


def column(sequence_parallel: bool, **options: Any) -> ColumnParallelLinear:
    return ColumnParallelLinear(D, F, sequence_parallel=sequence_parallel, rngs=nnx.Rngs(0), **options)


def row(sequence_parallel: bool, **options: Any) -> RowParallelLinear:
    return RowParallelLinear(F, D, sequence_parallel=sequence_parallel, rngs=nnx.Rngs(0), **options)


def tokens(sequence_parallel: bool) -> P:
    return P("data", "tensor" if sequence_parallel else None)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence_parallel"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_column_in_both_views(sizes: tuple[int, ...], sequence_parallel: bool, bias: bool):
    compare_views(
        lambda split: column(split, bias=bias),
        numbers(B, T, D),
        make_mesh(*sizes),
        sequence_parallel=sequence_parallel,
        x_spec=tokens(sequence_parallel),
        y_spec=P("data", None, "tensor"),
    )


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence_parallel"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_row_in_both_views(sizes: tuple[int, ...], sequence_parallel: bool, bias: bool):
    compare_views(
        lambda split: row(split, bias=bias),
        numbers(B, T, F),
        make_mesh(*sizes),
        sequence_parallel=sequence_parallel,
        x_spec=P("data", None, "tensor"),
        y_spec=tokens(sequence_parallel),
    )


def test_without_a_batch_dim():
    """The token dim is the last but one, whatever stands before it."""
    compare_views(
        lambda split: column(split, bias=True),
        numbers(T, D),
        make_mesh(tensor=4),
        sequence_parallel=True,
        x_spec=P("tensor", None),
        y_spec=P(None, "tensor"),
    )
    compare_views(
        lambda split: row(split, bias=True),
        numbers(T, F),
        make_mesh(tensor=4),
        sequence_parallel=True,
        x_spec=P(None, "tensor"),
        y_spec=P("tensor", None),
    )


@pytest.mark.parametrize("make", [column, row])
def test_the_formula(make: Any):
    layer = make(False, bias=True)
    params = random_params(layer)
    x = numbers(B, T, layer.weight.shape[0])
    assert_same(nnx.merge(nnx.graphdef(layer), params)(x), x @ params["weight"] + params["bias"])


@pytest.mark.parametrize("make", [column, row])
def test_initial_weights(make: Any):
    """Biases start at zero, and weights as `kernel_init` says, in `param_dtype`."""
    layer = make(False, bias=True, kernel_init=nnx.initializers.constant(3.0), param_dtype=np.float16)
    assert {p.dtype for p in jax.tree.leaves(nnx.state(layer))} == {np.dtype(np.float16)}
    np.testing.assert_array_equal(layer.weight[...], 3.0)
    np.testing.assert_array_equal(layer.bias[...], 0.0)
