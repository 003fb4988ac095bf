"""The opponent of `jaxpar bench pipeline`: GPipe as one scan over ticks that JAX differentiates.

This is how pipelines in one JAX program are usually written: the loop over ticks is the forward pass, and its
gradient is the backward pass of GPipe, with everything that the forward kept still there.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxpar.collectives import psum, shift, varying
from jaxpar.collectives.in_order import in_order
from jaxpar.config import Config
from jaxpar.layers import specs
from jaxpar.losses import cross_entropy
from jaxpar.mesh import DATA, PIPE, batch_spec
from jaxpar.step import model_maker


def scanned_gpipe(config: Config, mesh: Mesh) -> jax.stages.Wrapped:
    """`(params, batch) -> (loss, grads)` over stages with equally many layers each, without remat."""
    model = nnx.eval_shape(lambda: model_maker(config, "cpu")(nnx.Rngs(0)))
    stages, microbatches = config.mesh.pipe, config.parallel.microbatches
    block_graph = nnx.graphdef(model.blocks)

    def loss(params: Any, batch: Any) -> jax.Array:
        whole = nnx.merge(nnx.graphdef(model), params)
        first, last = lax.axis_index(PIPE) == 0, lax.axis_index(PIPE) == stages - 1

        def tick(act: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            embedded = whole.embed(batch["tokens"][jnp.minimum(t, microbatches - 1)])
            x = jnp.where(first, embedded, act)
            layer = lambda x, params: (model.block(nnx.merge(block_graph, params), x, None), None)
            y, _ = lax.scan(layer, x, params["blocks"])
            return shift(y, PIPE), y

        nothing = jnp.zeros_like(whole.embed(batch["tokens"][0]))
        ticks = jnp.arange(microbatches + stages - 1)
        _, outputs = lax.scan(tick, varying(nothing, PIPE), ticks)

        def head(total: jax.Array, xs: Any) -> tuple[jax.Array, None]:
            y, targets, mask = xs
            logits = whole.head(psum(jnp.where(last, y, 0), PIPE))
            return total + cross_entropy(logits, targets, mask)[0], None

        zero = varying(jnp.zeros(()), DATA)
        return lax.scan(head, zero, (outputs[stages - 1 :], batch["targets"], batch["mask"]))[0]

    def block_view(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        split = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
        value, grads = jax.value_and_grad(loss)(varying(params, DATA), split)
        tokens = psum(batch["mask"].sum(dtype=value.dtype), DATA)
        return jax.tree.map(lambda x: psum(x, DATA) / tokens, (value, grads))

    layouts, rows = specs(model, mesh), batch_spec(mesh)
    in_view = partial(jax.shard_map, mesh=mesh, in_specs=(layouts, rows), out_specs=(jax.P(), layouts))
    return jax.jit(in_view(in_order(block_view, mesh)))
