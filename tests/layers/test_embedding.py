"""The vocabulary's table, split over pipe and tensor, against plain indexing and `x @ table.T`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.layers import LearnedPositions, VocabParallelEmbedding, specs
from jaxpar.losses import cross_entropy
from jaxpar.mesh import VOCAB_AXES, make_mesh
from tests.layers.both_views import B, D, T, assert_same, compare_views, numbers, random_params

V, MULTIPLE, ROWS = 17, 8, 24
"""Under 8 devices the last two hold padding only, and the one before them both kinds."""
MESHES = [(2, 1, 4), (1, 2, 4), (1, 2, 2)]


def table(sequence_parallel: bool, **options: Any) -> VocabParallelEmbedding:
    return VocabParallelEmbedding(
        V, D, multiple=MULTIPLE, sequence_parallel=sequence_parallel, rngs=nnx.Rngs(0), **options
    )


def token_ids() -> np.ndarray:
    """Random, with the last real one among them."""
    ids = np.random.default_rng(3).integers(0, V, (B, T), dtype=np.int32)
    ids[0, 0] = V - 1
    return ids


@pytest.fixture(params=MESHES, ids=str)
def mesh(request: pytest.FixtureRequest) -> jax.sharding.Mesh:
    return make_mesh(*request.param)


@pytest.fixture(params=[False, True], ids=["whole", "sequence_parallel"])
def sequence_parallel(request: pytest.FixtureRequest) -> bool:
    return request.param


def tokens(sequence_parallel: bool) -> P:
    return P("data", "tensor" if sequence_parallel else None)


def test_vectors_in_both_views(mesh: jax.sharding.Mesh, sequence_parallel: bool):
    compare_views(
        table,
        token_ids(),
        mesh,
        sequence_parallel=sequence_parallel,
        x_spec=P("data"),
        y_spec=tokens(sequence_parallel),
    )


def test_logits_in_both_views(mesh: jax.sharding.Mesh, sequence_parallel: bool):
    compare_views(
        table,
        numbers(B, T, D),
        mesh,
        sequence_parallel=sequence_parallel,
        x_spec=tokens(sequence_parallel),
        y_spec=P("data", None, VOCAB_AXES),
        call=lambda layer, x: layer.logits(x),
    )


def test_tied_in_both_views(mesh: jax.sharding.Mesh, sequence_parallel: bool):
    """One table for both: its gradient is the sum of both uses."""
    compare_views(
        table,
        token_ids(),
        mesh,
        sequence_parallel=sequence_parallel,
        x_spec=P("data"),
        y_spec=P("data", None, VOCAB_AXES),
        call=lambda layer, ids: layer.logits(layer(ids) ** 2),
    )


def test_the_formulas():
    layer = table(False)
    params = random_params(layer)
    layer = nnx.merge(nnx.graphdef(layer), params)
    assert params["weight"].shape == (ROWS, D)
    np.testing.assert_array_equal(layer(token_ids()), params["weight"][token_ids()])
    x = numbers(B, T, D)
    assert_same(layer.logits(x)[..., :V], x @ params["weight"][:V].T)
    np.testing.assert_array_equal(layer.logits(x)[..., V:], -np.inf)


def test_padding_gets_no_probability_and_no_gradient(mesh: jax.sharding.Mesh):
    """Exactly 0 both, even where the padded rows hold huge numbers."""
    layer = table(False)
    params = random_params(layer)
    params["weight"][V:] = 1e3
    graph = nnx.graphdef(layer)
    spec = specs(layer, mesh)

    def block(params: Any, ids: jax.Array) -> tuple[jax.Array, Any]:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            layer = nnx.merge(graph, params)
            logits = layer.logits(layer(ids))
            return cross_entropy(logits, ids, jnp.ones_like(ids))[0], logits

        grads, logits = jax.grad(loss, has_aux=True)(params)
        return logits, grads

    split = jax.shard_map(block, mesh=mesh, in_specs=(spec, P("data")), out_specs=(P("data", None, VOCAB_AXES), spec))
    logits, grads = jax.jit(split)(params, token_ids())
    probabilities = jax.nn.softmax(logits)
    np.testing.assert_array_equal(probabilities[..., V:], 0.0)
    np.testing.assert_array_equal(grads["weight"][V:], 0.0)
    assert (np.abs(grads["weight"][:V]).max(1) > 0).all()


def test_bfloat16_logits_are_added_in_float32():
    """A vector of 256 ones and one 2^-9: bfloat16 sums, or a bfloat16 result, would lose the small one."""
    layer = VocabParallelEmbedding(3, 257, multiple=1, embedding_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    layer.weight[...] = layer.weight[...].astype(jnp.bfloat16)
    x = jnp.ones((1, 1, 257), jnp.bfloat16).at[0, 0, 256].set(2.0**-9)
    logits = layer.logits(x)
    assert logits.dtype == jnp.float32
    np.testing.assert_array_equal(logits, 256 + 2.0**-9)


@pytest.mark.parametrize("vocab_size, multiple, rows", [(503, 128, 512), (512, 128, 512), (17, 8, 24), (17, 1, 17)])
def test_the_table_is_padded_the_same_everywhere(vocab_size: int, multiple: int, rows: int):
    """Real rows do not depend on the padding, and padded ones start at zero."""
    layer = VocabParallelEmbedding(vocab_size, 3, multiple=multiple, rngs=nnx.Rngs(0))
    bare = VocabParallelEmbedding(vocab_size, 3, multiple=1, rngs=nnx.Rngs(0))
    assert layer.weight.shape == (rows, 3)
    np.testing.assert_array_equal(layer.weight[...][:vocab_size], bare.weight[...])
    np.testing.assert_array_equal(layer.weight[...][vocab_size:], 0)


def test_learned_positions_in_both_views(mesh: jax.sharding.Mesh, sequence_parallel: bool):
    compare_views(
        lambda split: LearnedPositions(T + 5, D, sequence_parallel=split, rngs=nnx.Rngs(0)),
        numbers(B, T, D),
        mesh,
        sequence_parallel=sequence_parallel,
        x_spec=tokens(sequence_parallel),
        y_spec=tokens(sequence_parallel),
        call=lambda layer, x: layer(x, T),
    )


def test_learned_positions_formula():
    layer = LearnedPositions(T + 5, D, rngs=nnx.Rngs(0))
    x = numbers(B, T, D)
    np.testing.assert_array_equal(layer(jnp.asarray(x), T), x + np.asarray(layer.weight[...][:T]))
