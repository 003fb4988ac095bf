"""Where parameters live: specs, their errors, and layers in a user's own `jit` program placed by `shardings`."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config import InputError
from jaxpar.layers import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelAttention,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    frequencies,
    shardings,
    specs,
)
from jaxpar.losses import cross_entropy
from jaxpar.mesh import make_mesh
from jaxpar.models import stack
from tests.layers.both_views import B, D, T, assert_same, numbers, random_params

V, H, K, F = 19, 8, 6, 12


def attention(**options: Any) -> ParallelAttention:
    return ParallelAttention(D, H, head_dim=K, qkv_bias=True, out_bias=True, rngs=nnx.Rngs(0), **options)


def test_every_layer_says_where_it_lives():
    mesh = make_mesh(2, 1, 4)
    column, row, bias = P(None, "tensor"), P("tensor", None), P("tensor")
    assert specs(ColumnParallelLinear(D, F, bias=True, rngs=nnx.Rngs(0)), mesh) == {"weight": column, "bias": bias}
    assert specs(RowParallelLinear(F, D, bias=True, rngs=nnx.Rngs(0)), mesh) == {"weight": row, "bias": P()}
    assert specs(LayerNorm(D, rngs=nnx.Rngs(0)), mesh) == {"scale": P(), "bias": P()}
    split = {"weight": column, "bias": bias}
    out = {"weight": row, "bias": P()}
    assert specs(attention(), mesh) == {"query": split, "key": split, "value": split, "out": out}
    copied = {"weight": P(), "bias": P()}
    assert specs(attention(num_kv_heads=2), mesh) == {"query": split, "key": copied, "value": copied, "out": out}


def test_the_vocabulary_is_split_over_pipe_and_tensor():
    layer = VocabParallelEmbedding(V, D, multiple=8, rngs=nnx.Rngs(0))
    assert specs(layer, make_mesh(1, 2, 4)) == {"weight": P(("pipe", "tensor"), None)}
    assert specs(layer, make_mesh(2, 1, 4)) == {"weight": P("tensor", None)}
    assert specs(layer, make_mesh(2, 2, 1)) == {"weight": P("pipe", None)}
    assert specs(layer, make_mesh(8, 1, 1)) == {"weight": P()}
    other = Mesh(np.array(jax.devices()[:4]), ("rows",), axis_types=(AxisType.Auto,))
    assert specs(layer, other) == {"weight": P()}


def test_stacked_layers_have_a_dim_in_front():
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.blocks = stack(lambda rngs: ColumnParallelLinear(D, F, bias=True, rngs=rngs), 3, nnx.Rngs(0))

    layout = {"weight": P(None, None, "tensor"), "bias": P(None, "tensor")}
    assert specs(Model(), make_mesh(2, 1, 4)) == {"blocks": layout}
    assert specs(Model(), make_mesh(8, 1, 1)) == {"blocks": {"weight": P(), "bias": P()}}
    # Over the stages, each of which has its own layers.
    layout = {"weight": P("pipe", None, "tensor"), "bias": P("pipe", "tensor")}
    assert specs(Model(), make_mesh(1, 2, 4)) == {"blocks": layout}


def test_abstract_modules_will_do():
    layer = nnx.eval_shape(lambda: attention())
    mesh = make_mesh(tensor=2)
    assert specs(layer, mesh) == specs(attention(), mesh)
    placed = shardings(layer, mesh)
    assert placed["query"]["weight"] == NamedSharding(mesh, P(None, "tensor"))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            lambda: ColumnParallelLinear(D, 9, rngs=nnx.Rngs(0)),
            "parameter weight: size 9 over tensor = 4 devices leaves 9 mod 4 = 1; they must be a multiple",
        ),
        (
            lambda: ParallelMLP(D, 10, rngs=nnx.Rngs(0)),
            "parameter down.weight: size 10 over tensor = 4 devices leaves 10 mod 4 = 2",
        ),
        (
            lambda: ParallelAttention(12, 6, rngs=nnx.Rngs(0)),  # 12 columns would divide, 6 heads do not
            "parameter key.weight: heads 6 over tensor = 4 devices leaves 6 mod 4 = 2; they must divide one another",
        ),
        (
            lambda: ParallelAttention(12, 6, num_kv_heads=1, rngs=nnx.Rngs(0)),
            "parameter out.weight: heads 6 over tensor = 4 devices leaves 6 mod 4 = 2; they must be a multiple",
        ),
        (
            lambda: VocabParallelEmbedding(V, D, multiple=20, rngs=nnx.Rngs(0)),
            "parameter weight: size 20 over pipe × tensor = 8 devices leaves 20 mod 8 = 4",
        ),
    ],
)
def test_what_cannot_be_split_names_parameter_and_equation(layer: Any, message: str):
    with pytest.raises(InputError, match=re.escape(message)):
        specs(layer(), make_mesh(1, 2, 4))


class UsersModel(nnx.Module):
    """Everything in one model, as a user may write it."""

    def __init__(self, sequence_parallel: bool, rngs: nnx.Rngs) -> None:
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "rngs": rngs}
        self.embedding = VocabParallelEmbedding(V, D, multiple=8, **options)
        self.norm = RMSNorm(D, rngs=rngs)
        angles = frequencies(K, 100.0)
        self.attention = ParallelAttention(
            D, H, num_kv_heads=2, head_dim=K, qkv_bias=True, rope_frequencies=angles, **options
        )
        self.mlp = ParallelMLP(D, F, **options)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x = self.embedding(tokens_BT)
        x = x + self.attention(self.norm(x))
        return self.embedding.logits(x + self.mlp(x))


@pytest.mark.parametrize("sizes", [(2, 1, 4), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence_parallel"])
def test_a_plain_jit_program_on_many_devices(sizes: tuple[int, ...], sequence_parallel: bool):
    """Global view, where the compiler inserts the communication: placement is all that differs from one device.

    The compiler may place things as it likes, so `sequence_parallel` means nothing here, and must do no harm.
    """
    mesh = make_mesh(*sizes)
    model = UsersModel(sequence_parallel, nnx.Rngs(0))
    graph = nnx.graphdef(model)
    params = random_params(model)
    ids = np.random.default_rng(1).integers(0, V, (B, T), dtype=np.int32)

    @jax.jit
    def loss_and_gradients(params: Any, ids: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            total, sums = cross_entropy(nnx.merge(graph, params)(ids[:, :-1]), ids[:, 1:], jnp.ones_like(ids[:, 1:]))
            return total / sums["tokens"]

        return jax.value_and_grad(loss)(params)

    want = loss_and_gradients(params, ids)
    placed = jax.device_put(params, shardings(model, mesh))
    batch = jax.device_put(ids, NamedSharding(mesh, P("data")))
    program = loss_and_gradients.lower(placed, batch).compile()
    assert_same(jax.device_get(program(placed, batch)), want)
    # It did run split: each device held its block of the weights, and the program communicates.
    assert placed["mlp"]["up"]["weight"].addressable_shards[0].data.shape == (D, F // 4)
    assert placed["embedding"]["weight"].addressable_shards[0].data.shape == (24 // (sizes[1] * 4), D)
    assert "all-reduce(" in program.as_text()


def test_a_users_own_axis_beside_ours():
    """On a mesh with other axes only `tensor` is used, and what ours do not have is left alone."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "tensor"), axis_types=(AxisType.Auto,) * 2)
    layer = ParallelMLP(D, F, rngs=nnx.Rngs(0))
    params, x = random_params(layer), numbers(B, T, D)
    apply = lambda params, x: nnx.merge(nnx.graphdef(layer), params)(x)
    rows = P("replica")
    block = jax.shard_map(apply, mesh=mesh, in_specs=(specs(layer, mesh), rows), out_specs=rows)
    assert_same(jax.jit(block)(params, x), apply(params, x))
