"""Three data-parallel programs that overlap differently: 8 layers of width 4096, 8,192 tokens a device.

A layer is two matrices with a squared ReLU between them. Differentiating with respect to weights that are the same
on all replicas sums each gradient where it is made; marked as varying, they are summed by hand at the end.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HIDDEN, TOKENS = 8, 4096, 16384, 8192
MATRIX_BYTES = WIDTH * HIDDEN * 2  # bfloat16


def layer(x, weights):
    up, down = weights
    hidden = jnp.square(jax.nn.relu((x @ up).astype(jnp.float32))).astype(x.dtype)
    return x + hidden @ down


def unrolled_loss(layers, x):
    for weights in layers:
        x = layer(x, weights)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def scanned_loss(stacked, x):
    x, _ = lax.scan(lambda x, weights: (layer(x, weights), None), x, stacked)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def lowered(mesh: Mesh, *, scanned: bool, reduce_at_end: bool) -> jax.stages.Lowered:
    def block(weights, x):
        if reduce_at_end:
            weights = jax.tree.map(lambda w: lax.pcast(w, "data", to="varying"), weights)
        loss, grads = jax.value_and_grad(scanned_loss if scanned else unrolled_loss)(weights, x)
        return lax.psum(loss, "data"), lax.psum(grads, "data") if reduce_at_end else grads

    abstract = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    stack = (LAYERS,) if scanned else ()
    weights = abstract((*stack, WIDTH, HIDDEN), P()), abstract((*stack, HIDDEN, WIDTH), P())
    x = abstract((TOKENS * mesh.size, WIDTH), P("data"))
    program = jax.shard_map(block, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    return jax.jit(program).lower(weights if scanned else [weights] * LAYERS, x)
