"""A model that is not ours trains on any layout through the protocol; remat, unrolling and stacking change nothing.

Letters: B batch, T tokens, D width, V vocabulary, L layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpar import verify
from jaxpar.config import Config
from jaxpar.layers import ParallelMLP, VocabParallelEmbedding
from jaxpar.losses import cross_entropy
from jaxpar.mesh import make_mesh
from jaxpar.models import Transformer, forward, stack
from jaxpar.step import build

B, T, D, F, V, L = 8, 6, 10, 12, 37, 3


def uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Compiles in a fraction of the time that normal draws take in float64."""
    return jax.random.uniform(key, shape, dtype, -0.4, 0.4)


UNIFORM: dict[str, Any] = {"param_dtype": jnp.float64, "kernel_init": uniform}
TABLE: dict[str, Any] = {"param_dtype": jnp.float64, "embedding_init": uniform}


class AverageLayer(nnx.Module):
    """No attention: every token sees the mean of those before it. Flax's own layers, and one of ours."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(D, param_dtype=jnp.float64, rngs=rngs)
        self.mix = nnx.Linear(D, D, rngs=rngs, **UNIFORM)
        self.decay = nnx.Param(jax.random.uniform(rngs.params(), (D,), jnp.float64))
        self.mlp = ParallelMLP(D, F, bias=True, rngs=rngs, **UNIFORM)

    def __call__(self, x: jax.Array) -> jax.Array:
        tokens = jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        mean = jnp.cumsum(self.norm(x), axis=1) / tokens ** jax.nn.sigmoid(self.decay[...])
        x = x + jnp.tanh(self.mix(mean))
        return x + self.mlp(x)


class AverageModel(nnx.Module):
    """All that `jaxpar` asks of a model: embed, blocks, block and head. The head is whole on every device."""

    def __init__(self, rngs: nnx.Rngs, layers: int = L) -> None:
        self.table = nnx.Embed(V, D, rngs=rngs, **TABLE)
        self.blocks = stack(AverageLayer, layers, rngs)
        self.out = nnx.Linear(D, V, rngs=rngs, **UNIFORM)

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        return self.table(tokens_BT)

    def block(self, layer: AverageLayer, x: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        return layer(x)

    def head(self, x: jax.Array) -> jax.Array:
        return self.out(x)


class SplitHeadModel(AverageModel):
    """The same with our vocabulary-parallel head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.out = VocabParallelEmbedding(V, D, multiple=8, rngs=rngs, **TABLE)

    def head(self, x: jax.Array) -> jax.Array:
        return self.out.logits(x)


def config(data: int, tensor: int, parallel: dict[str, Any] | None = None, **model: Any) -> Config:
    sizes = {
        "architecture": "llama",
        "vocab_size": V,
        "vocab_multiple": 8,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": 4,
        "head_dim": 6,
    }
    return Config.from_dict(
        {
            "model": sizes | model,
            "mesh": {"data": data, "tensor": tensor},
            "parallel": parallel or {},
            "data": {"train": ["unused"], "sequence_length": T, "tokenizer": "unused"},
            "optimizer": {"name": "sgd", "learning_rate": 0.1, "schedule": "constant"},
            "train": {
                "steps": 3,
                "global_batch": B,
                "run_dir": "unused",
                "param_dtype": "float64",
                "compute_dtype": "float64",
            },
        }
    )


@pytest.mark.parametrize(
    ("make_model", "sizes"), [(AverageModel, (2, 4)), (AverageModel, (8, 1)), (SplitHeadModel, (2, 4))]
)
def test_a_model_that_is_not_ours_computes_the_same_on_every_layout(make_model: Any, sizes: tuple[int, int]):
    """Loss, every gradient and every updated parameter."""
    settings = config(*sizes, parallel={"remat": "full"})
    report = verify.compare(settings, make_mesh(sizes[0], 1, sizes[1]), make_model, steps=2)
    assert report.tolerance == 1e-9  # float64; about 1e-15 is seen
    assert report.ok, report.comparisons[:5]
    names = {c.name for c in report.comparisons if c.kind == "gradient"}
    assert {"table.embedding", "blocks.mix.kernel", "blocks.decay", "blocks.mlp.up.weight"} <= names


def test_a_model_that_is_not_ours_trains():
    """Three steps of SGD against a loop that knows nothing of jaxpar but the model."""
    mesh = make_mesh(2, 1, 4)
    settings = config(2, 4, parallel={"microbatches": 2})
    program = build(settings, mesh, AverageModel)
    state = program.init()
    params = jax.device_put(jax.device_get(state.params), jax.devices()[0])
    graph = nnx.graphdef(nnx.eval_shape(lambda: AverageModel(nnx.Rngs(0))))
    optimizer = optax.sgd(0.1)
    opt_state = optimizer.init(params)

    @jax.jit
    def gradients(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            model = nnx.merge(graph, params)
            x = model.table(batch["tokens"])
            for i in range(L):
                layer_graph, layers = nnx.split(model.blocks)
                x = nnx.merge(layer_graph, jax.tree.map(lambda p, i=i: p[i], layers))(x)
            losses = optax.softmax_cross_entropy_with_integer_labels(model.out(x), batch["targets"])
            return jnp.mean(losses, where=batch["mask"])

        return jax.value_and_grad(loss)(params)

    losses = []
    for seed in range(3):
        batch = verify.random_batch(settings, seed % 2)
        want_loss, grads = gradients(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        state, metrics = program.train_step(state, jax.device_put(batch, program.batch_sharding))
        np.testing.assert_allclose(metrics["loss"], want_loss, rtol=1e-12)  # float64
        losses.append(float(metrics["loss"]))
    for got, want in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-9)  # as asked; about 1e-16 is seen
    assert losses[2] < losses[0]  # the third batch is the first one again


# 2 does not divide the 3 layers, and 5 is more than there are.
POLICIES: dict[str, dict[str, Any]] = {
    "dots": {"remat": "dots"},
    "full": {"remat": "full"},
    "names": {"remat": ["query", "attention_out", "mlp_hidden"]},
    "unrolled by 2": {"unroll": 2},
    "unrolled whole, full": {"unroll": 5, "remat": "full"},
}


@pytest.fixture(scope="module")
def weights() -> Any:
    random = np.random.default_rng(2)
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(transformer)))
    return jax.tree.map(lambda p: 0.3 * random.normal(size=p.shape), shapes)


def transformer() -> Transformer:
    model = config(1, 1, hidden_size=24, resid_pdrop=0.2).model
    return Transformer(model, rngs=nnx.Rngs(0), param_dtype=jnp.float64)


def gradients_of_the_transformer(weights: Any, remat: Any = "none", unroll: int = 1) -> Any:
    """With dropout, in global view; in block view this is part of the train step's tests."""
    graph = nnx.graphdef(nnx.eval_shape(transformer))
    tokens = np.random.default_rng(0).integers(0, V, (B, T), dtype=np.int32)
    keys = jax.random.split(jax.random.key(7), B)

    def loss(params: Any) -> jax.Array:
        logits = forward(nnx.merge(graph, params), tokens, keys, remat=remat, unroll=unroll)
        return cross_entropy(logits, np.roll(tokens, -1, axis=1), np.ones((B, T)))[0]

    return jax.jit(jax.value_and_grad(loss))(weights)


@pytest.fixture(scope="module")
def plain_gradients(weights: Any) -> Any:
    return gradients_of_the_transformer(weights)


@pytest.mark.parametrize("name", POLICIES)
def test_remat_and_unrolling_do_not_change_gradients(name: str, weights: Any, plain_gradients: Any):
    got = gradients_of_the_transformer(weights, **POLICIES[name])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(plain_gradients), strict=True):
        scale = max(1, np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13 * scale)  # float64, added up in another order


def kept_bytes(remat: Any) -> int:
    """What the forward pass keeps for the backward pass, weights and tokens included."""
    model = nnx.eval_shape(transformer)
    graph, params = nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model))

    def backward(params: Any, tokens: jax.Array) -> Any:
        return jax.vjp(lambda params: forward(nnx.merge(graph, params), tokens, remat=remat), params)[1]

    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(backward, params, tokens)))


def test_what_remat_keeps():
    """`full` keeps the layers' inputs; a name adds that tensor of every layer, to the byte."""
    full = kept_bytes("full")
    of_each_layer = L * B * T * 8
    assert kept_bytes(["mlp_hidden"]) - full == of_each_layer * F
    assert kept_bytes(["attention_out", "mlp_hidden"]) - full == of_each_layer * (F + 24)
    assert kept_bytes(["key"]) - full == of_each_layer * 24
    # Results of multiplications with weights: query, key, value, out, gate and up; nothing needs that of down.
    assert kept_bytes("dots") - full == of_each_layer * (4 * 24 + 2 * F)
    assert kept_bytes("none") > kept_bytes("dots")


def test_a_layers_weights_do_not_depend_on_how_many_there_are():
    layer = lambda rngs: ParallelMLP(D, F, rngs=rngs, **UNIFORM)
    made = lambda layers, seed: nnx.to_pure_dict(nnx.state(stack(layer, layers, nnx.Rngs(seed))))
    few, many, other = jax.jit(lambda: (made(2, 3), made(3, 3), made(2, 4)))()
    assert jax.tree.map(jnp.shape, few) == {
        "gate": {"weight": (2, D, F)},
        "up": {"weight": (2, D, F)},
        "down": {"weight": (2, F, D)},
    }
    for a, b, c in zip(jax.tree.leaves(few), jax.tree.leaves(many), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b[:2])
        assert not np.any(a[0] == a[1]) and not np.any(a == c)


class NoiseModel(nnx.Module):
    """Every block adds one number drawn from the example's key."""

    def __init__(self, layers: int) -> None:
        self.blocks = stack(lambda rngs: nnx.LayerNorm(1, rngs=rngs), layers, nnx.Rngs(0))

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        return jnp.zeros(tokens_BT.shape[:1])

    def block(self, layer: Any, x: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        return x if keys_B is None else x + jax.vmap(jax.random.uniform)(keys_B)

    def head(self, x: jax.Array) -> jax.Array:
        return x


@pytest.mark.parametrize("unroll", [1, 2, 9])
def test_keys_differ_by_example_and_layer(unroll: int):
    keys = jax.random.split(jax.random.key(0), B)
    tokens = jnp.zeros((B, T), jnp.int32)
    sums = [np.asarray(forward(NoiseModel(n), tokens, keys, unroll=unroll)) for n in (1, 2, 3)]
    drawn = np.diff(sums, axis=0, prepend=0)
    assert len(np.unique(np.round(drawn, 12))) == 3 * B
    np.testing.assert_array_equal(forward(NoiseModel(2), tokens, unroll=unroll), 0)
