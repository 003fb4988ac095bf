"""A model that is not ours, with everything such a model may have, and its config.

Letters: B batch, T tokens, D width, V vocabulary, L layers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import psum
from jaxpar.config import Config
from jaxpar.layers import dropout
from jaxpar.mesh import TENSOR
from jaxpar.models import stack

B, T, D, F, V, L = 8, 6, 10, 12, 37, 5
FLOAT: dict[str, Any] = {"param_dtype": jnp.float64}


class Layer(nnx.Module):
    """Every token sees a weighted mean of those before it; Flax's layers, a split matrix, constants and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        key = rngs.params()
        self.norm = nnx.RMSNorm(D, rngs=rngs, **FLOAT)
        self.mix = nnx.Sequential(nnx.Linear(D, D, rngs=rngs, **FLOAT), jnp.tanh, nnx.Linear(D, D, rngs=rngs, **FLOAT))
        self.up = nnx.Param(jax.random.uniform(key, (D, F), jnp.float64, -0.4, 0.4), layout=P(None, TENSOR))
        self.down = nnx.Param(jax.random.uniform(key, (F, D), jnp.float64, -0.4, 0.4), layout=P(TENSOR, None))
        self.gain = nnx.Param(jnp.ones((), jnp.float64))
        self.mask = nnx.Variable(jnp.tril(jnp.ones((T, T))))  # the same in all layers
        self.slope = nnx.Variable(jax.random.uniform(key, (), jnp.float64))  # another in each
        self.scale = np.linspace(0.5, 1.0, D)

    def __call__(self, x: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        distance_TT = jnp.arange(T)[:, None] - jnp.arange(T)
        weights_TT = self.mask[...] * jnp.exp(-self.slope[...] * jnp.abs(distance_TT))
        mean = jnp.einsum("ts,bsd->btd", weights_TT, self.norm(x) * self.scale)
        x = x + self.gain[...] * dropout(self.mix(mean), keys_B, 0.3)
        return x + psum(jax.nn.gelu(x @ self.up[...]) @ self.down[...], TENSOR)


class OwnModel(nnx.Module):
    """One table for embedding and head, and a constant outside the stack too."""

    def __init__(self, rngs: nnx.Rngs, layers: int = L, make_layer: Callable[[nnx.Rngs], nnx.Module] = Layer) -> None:
        self.table = nnx.Embed(V, D, rngs=rngs, **FLOAT)
        self.blocks = stack(make_layer, layers, rngs)
        self.out = self.table.embedding
        self.positions = nnx.Variable(jax.random.normal(rngs.positions(), (T, D), jnp.float64))

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        return self.table(tokens_BT) + self.positions[...]

    def block(self, layer: Layer, x: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        return layer(x, keys_B)

    def head(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("btd,vd->btv", x, self.out[...])


def config(
    layout: tuple[int, int, int] = (1, 1, 1),
    *,
    parallel: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **model: Any,
) -> Config:
    """What describes `OwnModel`, float64; without dropout, of which the model has its own."""
    sizes = {
        "architecture": "llama",
        "vocab_size": V,
        "vocab_multiple": 8,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": 4,
        "head_dim": 2,
    }
    floats = {"param_dtype": "float64", "compute_dtype": "float64"}
    return Config.from_dict(
        {
            "model": sizes | model,
            "mesh": dict(zip(("data", "pipe", "tensor"), layout, strict=True)),
            "parallel": parallel or {},
            "data": {"train": ["unused"], "sequence_length": T, "tokenizer": "unused"},
            "optimizer": {"name": "sgd", "learning_rate": 0.1, "schedule": "constant"},
            "train": {"steps": 3, "global_batch": B, "run_dir": "unused", "seed": 3} | floats | (train or {}),
        }
    )
