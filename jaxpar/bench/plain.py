"""The opponent of `jaxpar bench step`: the same Llama-style model as anybody would write it without jaxpar.

Flax modules, optax, `jit` and `NamedSharding`, nothing else: parameters are placed in the Megatron way, the batch
is split over `data`, and the compiler inserts all communication. Layers are stacked and scanned, as in MaxText.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config import Config, ModelConfig


def rope(x_BTHK: jax.Array, theta: float) -> jax.Array:
    """Rotary positions."""
    half = x_BTHK.shape[-1] // 2
    angle_Tk = jnp.arange(x_BTHK.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle_Tk)[:, None], jnp.sin(angle_Tk)[:, None]
    a, b = x_BTHK[..., :half], x_BTHK[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class PlainBlock(nnx.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, F, K = config.hidden_size, config.intermediate_size, config.head_dim
        linear = lambda i, o: nnx.Linear(i, o, use_bias=False, rngs=rngs)
        self.norm1 = nnx.RMSNorm(D, epsilon=config.rms_norm_eps, rngs=rngs)
        self.q = linear(D, config.num_attention_heads * K)
        self.k = linear(D, config.num_key_value_heads * K)
        self.v = linear(D, config.num_key_value_heads * K)
        self.o = linear(config.num_attention_heads * K, D)
        self.norm2 = nnx.RMSNorm(D, epsilon=config.rms_norm_eps, rngs=rngs)
        self.gate, self.up, self.down = linear(D, F), linear(D, F), linear(F, D)
        self.head_dim, self.theta = K, config.rope_theta

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply to `[B, T, D]`."""
        y = self.norm1(x)
        q, k, v = (f(y).reshape(*y.shape[:2], -1, self.head_dim) for f in (self.q, self.k, self.v))
        y = jax.nn.dot_product_attention(rope(q, self.theta), rope(k, self.theta), v, is_causal=True)
        x = x + self.o(y.reshape(*y.shape[:2], -1))
        y = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class PlainModel(nnx.Module):
    """Embedding, scanned blocks, norm, head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, V = config.hidden_size, config.vocab_size
        self.embed = nnx.Embed(V, D, rngs=rngs)
        keys = jax.random.split(rngs.params(), config.num_hidden_layers)
        self.blocks = nnx.vmap(lambda key: PlainBlock(config, nnx.Rngs(params=key)))(keys)
        self.norm = nnx.RMSNorm(D, epsilon=config.rms_norm_eps, rngs=rngs)
        self.head = nnx.Linear(D, V, use_bias=False, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Logits `[B, T, V]`."""
        graph, layers = nnx.split(self.blocks)
        x, _ = lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), self.embed(tokens_BT), layers)
        return self.head(self.norm(x))


COLUMN, ROW = ("q", "k", "v", "gate", "up", "head"), ("o", "down")


def plain_step(config: Config, mesh: Mesh) -> tuple[Callable[..., Any], Any]:
    """The jitted train step `((params, opt_state), batch) -> (state, loss)` and its initial state."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: PlainModel(config.model, nnx.Rngs(0))))
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.optimizer.clip_norm or 1.0),
        optax.adamw(config.optimizer.learning_rate, config.optimizer.b1, config.optimizer.b2, config.optimizer.eps),
    )

    def init() -> Any:
        params = nnx.to_pure_dict(nnx.state(PlainModel(config.model, nnx.Rngs(config.train.seed)), nnx.Param))
        return params, optimizer.init(params)

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        names = [str(getattr(k, "key", "")) for k in path]
        if any(name in COLUMN for name in names):
            spec = P(*[None] * (leaf.ndim - 1), "tensor")
        elif any(name in ROW for name in names):
            spec = P(*[None] * (leaf.ndim - 2), "tensor", None)
        else:
            spec = P("tensor", None) if "embed" in names else P()
        return NamedSharding(mesh, spec)

    shardings = jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(init))
    rows = NamedSharding(mesh, P("data"))

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = nnx.merge(graph, params)(batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])

    def step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    compiled = jax.jit(step, in_shardings=(shardings, rows), out_shardings=(shardings, None), donate_argnums=0)
    return compiled, jax.jit(init, out_shardings=shardings)()
