"""Loss and gradients in block view: what runs inside the step's `shard_map`, with pipeline stages and without.

Letters: B batch (sequences), M microbatches; a lower-case letter is this device's block.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives import axis_index, psum
from jaxpar.config import Config
from jaxpar.layers.dropout import example_keys
from jaxpar.losses import Sums, cross_entropy, means
from jaxpar.mesh import DATA
from jaxpar.models.protocol import WHOLE, Remat, Use, run
from jaxpar.pipeline.executor import Executor
from jaxpar.pipeline.partition import Partition, block_costs, partition
from jaxpar.pipeline.schedules import make_schedule
from jaxpar.pipeline.stacking import Stacking
from jaxpar.zero import Replicas, widened

Params = dict[str, Any]
Batch = dict[str, jax.Array]


def make_loss(model: Any, *, remat: Remat, unroll: int, z_loss: float) -> Callable[..., tuple[jax.Array, Sums]]:
    """`(params, batch, keys_B, use)` to what `cross_entropy` gives for a model, in the view it is called in."""

    def loss(params: Params, batch: Batch, keys_B: jax.Array | None = None, use: Use = WHOLE) -> tuple[jax.Array, Sums]:
        logits = run(model, params, batch["tokens"], keys_B, use, remat=remat, unroll=unroll)
        return cross_entropy(logits, batch["targets"], batch["mask"], z_loss=z_loss)

    return loss


def make_loss_and_grads(
    loss: Callable[..., tuple[jax.Array, Sums]],
    replicas: Replicas,
    *,
    microbatches: int,
    layer_by_layer: bool,
    dropout_seed: int,
) -> Callable[[Params, Batch, jax.Array, jax.Array], tuple[Sums, Params]]:
    """Loss and gradients of this device's rows in block view, reduced once over `data`.

    Parameters are cast once and marked as varying over `data`, so that differentiating leaves each replica's
    gradients alone; microbatches add theirs in float32 or wider, and one sum over `data` ends it.

    Args:
        loss: what `make_loss` returns.
        replicas: how parameters get ready and gradients are summed.
        microbatches: pieces of the batch, one after the other.
        layer_by_layer: the last microbatch's backward pass sums each layer's gradients over `data` as it makes them.
        dropout_seed: of the keys that the model's blocks get.
    """

    def sums_and_grads(loss: Callable, params: Params) -> tuple[Sums, Params]:
        (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return sums, grads

    def loss_and_grads(params: Params, batch: Batch, step: jax.Array, first_row: jax.Array) -> tuple[Sums, Params]:
        ready = replicas.ready(params)
        rows = batch["tokens"].shape[0]
        rows_b = first_row + axis_index(DATA) * rows + jnp.arange(rows)
        keys_b = example_keys(dropout_seed, step, rows_b)
        split = lambda x: x.reshape(microbatches, rows // microbatches, *x.shape[1:])
        pieces = jax.tree.map(split, (batch, keys_b))

        def accumulate(total: Params, microbatch: tuple[Batch, jax.Array]) -> tuple[Params, Sums]:
            sums, grads = sums_and_grads(lambda p: loss(p, *microbatch, replicas.use), ready)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), sums

        def last(total: Params | None) -> tuple[Sums, Params]:
            """The last microbatch, its gradients added to the others' and summed over `data` on the way."""
            microbatch = jax.tree.map(lambda x: x[-1], pieces)
            given = lambda landing: replicas.landing_params(ready, total, landing)
            return sums_and_grads(
                lambda landing: loss(given(landing), *microbatch, replicas.landing_use), replicas.landing(params)
            )

        before = microbatches - layer_by_layer
        total, sums = jax.tree.map(lambda p: jnp.zeros_like(widened(p)), ready), None
        if before:
            total, sums_M = lax.scan(accumulate, total, jax.tree.map(lambda x: x[:before], pieces))
            sums = jax.tree.map(lambda x_M: x_M.sum(0), sums_M)
        if layer_by_layer:
            added, grads = last(total if before else None)
            sums = psum(jax.tree.map(jnp.add, sums, added) if before else added, DATA)
        else:
            sums, grads = replicas.land(sums, total)
        return means(sums), jax.tree.map(lambda g: g / jnp.maximum(sums["tokens"], 1), grads)

    return loss_and_grads


def partition_of(config: Config) -> Partition:
    """Which layers run on which pipeline stage: by `parallel.layer_costs`, or by formula."""
    costs, cut_bytes = block_costs(config.model, config.data.sequence_length)
    return partition(config.parallel.layer_costs or costs, cut_bytes, config.mesh.pipe, config.parallel.chunks)


def layer_by_layer(config: Config) -> bool:
    """Whether the last microbatch's backward pass sums over `data` as it goes (ZeRO stage 3 does by itself)."""
    parallel = config.parallel
    overlapped = config.grad_reduce.schedule == "overlapped" or (parallel.zero == 2 and parallel.microbatches == 1)
    return overlapped and parallel.zero < 3 and config.mesh.pipe == 1


def in_block_view(
    config: Config, model: Any, stacking: Stacking, replicas: Replicas, platform: str
) -> tuple[Callable, Callable]:
    """What runs inside `shard_map`: `loss_and_grads(params, batch, step, first_row)` and `loss(params, batch)`."""
    parallel = config.parallel
    seed = config.train.seed  # a block without dropout ignores its keys, and XLA drops what makes them
    shared: dict[str, Any] = {"remat": parallel.remat, "unroll": parallel.unroll, "z_loss": config.train.z_loss}
    if config.mesh.pipe > 1:
        # Permutes are joined by all devices of a mesh, so that none may stand where only some stages have work.
        skip = platform == "cpu" and not (replicas.gathers and replicas.reduction.algorithm != "native")
        executor = Executor(
            model,
            make_schedule(parallel.schedule, config.mesh.pipe, parallel.microbatches, parallel.chunks),
            stacking,
            ready=replicas.ready,
            use=replicas.use,
            land=replicas.land,
            dropout_seed=seed,
            skip_idle=skip if parallel.idle == "auto" else parallel.idle == "skip",
            **shared,
        )
        return executor.loss_and_grads, executor.loss
    loss = make_loss(model, **shared)
    grads = make_loss_and_grads(
        loss,
        replicas,
        microbatches=parallel.microbatches,
        layer_by_layer=layer_by_layer(config),
        dropout_seed=seed,
    )
    # What is reported of an evaluation is the cross-entropy: no penalty is computed.
    evaluated = make_loss(model, remat=parallel.remat, unroll=parallel.unroll, z_loss=0.0)
    return grads, lambda params, batch: evaluated(replicas.ready(params), batch, None, replicas.use)[1]
