"""Runs a schedule table inside `shard_map`: forwards and backwards of microbatches over the stages of `pipe`.

Everything is lockstep: in a tick each stage may do one forward and one backward, and what it sends is used by its
neighbour in the next tick. Ticks of the same kind are one `lax.scan` with a straight-line body, so a program has one
copy of the stage per phase whatever the number of microbatches. A stage that has nothing to do in a tick computes on
garbage, which masks keep out of every sum and every live buffer; or it skips the work with a conditional.

What a forward keeps for its backward is what `jax.vjp` keeps, less the parameters themselves: the leaves of the
returned function go into a ring buffer of slots, so the remat policy alone decides how large a slot is.

Letters: M microbatches, S stages, v chunks, H rows (layers) of a chunk, b sequences of a microbatch on this replica,
T tokens, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.collectives import axis_index, psum, shift, varying, varying_axes
from jaxpar.layers.dropout import example_keys, fold_in
from jaxpar.layers.layout import STACK
from jaxpar.losses import Sums, cross_entropy, means
from jaxpar.mesh import DATA, PIPE
from jaxpar.models.protocol import Remat, Use, checkpointed, layer_maker, outside_stack
from jaxpar.pipeline import slots
from jaxpar.pipeline.schedules import Phase, Schedule
from jaxpar.pipeline.stacking import Stacking

Tree = Any


@dataclass(frozen=True)
class Executor:
    """Loss and gradients of a model under a schedule, in block view.

    Attributes:
        model: the model, abstract; its parameters come with `blocks` arranged by `stacking`.
        schedule: the table to run.
        stacking: which layers are where.
        ready: parameters to differentiate, cast to the compute dtype; called once, before the first tick.
        use: how a layer, the embedding and the head get theirs from those.
        land: sums what the loss is made of, and gradients, over `data`; called once, after the last tick.
        remat: what a forward keeps, see `jaxpar.models.forward`.
        unroll: layers per iteration of the scan over a chunk's layers.
        z_loss: see `jaxpar.losses.cross_entropy`.
        dropout_seed: of the keys that blocks get in training.
        skip_idle: skip idle work with a conditional.
    """

    model: Any
    schedule: Schedule
    stacking: Stacking
    ready: Callable[[Tree], Tree]
    use: Use
    land: Callable[[Sums, Tree], tuple[Sums, Tree]]
    remat: Remat
    unroll: int
    z_loss: float
    dropout_seed: int
    skip_idle: bool

    def loss_and_grads(self, params: Tree, batch: Tree, step: jax.Array, first_row: jax.Array) -> tuple[Sums, Tree]:
        """Means over the tokens and gradients, like `jaxpar.gradients.make_loss_and_grads`."""
        sums, blocks, rest = _Run(self, params, batch, (step, first_row)).train()
        sums, grads = self.land(sums, rest | {STACK: blocks})
        return means(sums), jax.tree.map(lambda g: g / jnp.maximum(sums["tokens"], 1), grads)

    def loss(self, params: Tree, batch: Tree) -> Sums:
        """Sums over this replica's tokens, forward only, without dropout and penalties."""
        return _Run(replace(self, z_loss=0.0), params, batch, None).evaluate()


class _Run:
    """One call of an `Executor`: its parameters and batch, and what a tick does with them."""

    def __init__(
        self, executor: Executor, params: Tree, batch: Tree, position: tuple[jax.Array, jax.Array] | None
    ) -> None:
        self.e, self.table, self.position = executor, executor.schedule, position
        ready, self.use = executor.ready(params), executor.use
        self.blocks = ready[STACK]
        self.rest = {name: tree for name, tree in ready.items() if name != STACK}
        self.stage_index = jnp.asarray(axis_index(PIPE))
        self.replica_rows = batch["tokens"].shape[0]
        M = self.table.microbatches
        self.batch = jax.tree.map(lambda x: x.reshape(M, self.replica_rows // M, *x.shape[1:]), batch)
        x = _zeros_of(lambda: self.embed(self.rest, jnp.int32(0)))
        self.first_x = varying(x, PIPE) + slots.IDLE
        self.no_sums = _zeros_of(lambda: self.head_loss(self.rest, x, jnp.int32(0))[1])

    # ---------------------------------------------------------------- the model's pieces

    def outside_stack(self, rest: Tree) -> Any:
        """The model with these parameters outside its blocks."""
        return outside_stack(self.e.model, self.use.rest(rest))

    def embed(self, rest: Tree, m: jax.Array) -> jax.Array:
        """Activations of microbatch m, made by all stages together."""
        return self.outside_stack(rest).embed(self.batch["tokens"][jnp.maximum(m, 0)])

    def head_loss(self, rest: Tree, x: jax.Array, m: jax.Array) -> tuple[jax.Array, Sums]:
        """The objective of microbatch m and its sums over tokens, computed by all stages together."""
        of_m = jax.tree.map(lambda a: a[jnp.maximum(m, 0)], self.batch)
        logits = self.outside_stack(rest).head(x)
        return cross_entropy(logits, of_m["targets"], of_m["mask"], z_loss=self.e.z_loss)

    def chunk(self, k: jax.Array) -> Tree:
        """The parameters of this stage's chunk k."""
        height = self.e.stacking.height
        return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, jnp.maximum(k, 0) * height, height), self.blocks)

    def keys(self, m: jax.Array) -> jax.Array | None:
        """Raw dropout keys of microbatch m's sequences (raw, so that they fit a ring buffer)."""
        if self.position is None:
            return None
        step, first_row = self.position
        b = self.replica_rows // self.table.microbatches
        rows_b = first_row + axis_index(DATA) * self.replica_rows + jnp.maximum(m, 0) * b + jnp.arange(b)
        return jax.random.key_data(example_keys(self.e.dropout_seed, step, rows_b))

    def stage(self, blocks: Tree, x: jax.Array, k: jax.Array, keys_b: jax.Array | None) -> jax.Array:
        """The layers of this stage's chunk k."""
        layers_SvH = self.e.stacking.table()
        layers_H = jnp.asarray(layers_SvH)[self.stage_index, jnp.maximum(k, 0)]
        padded = bool((layers_SvH < 0).any())
        make_layer = layer_maker(self.e.model.blocks)

        def layer(x: jax.Array, params: Tree, index: jax.Array) -> jax.Array:
            keys = None if keys_b is None else fold_in(jax.random.wrap_key_data(keys_b), index)
            y = self.e.model.block(make_layer(self.use.layer(params), index), x, keys)
            return jnp.where(index >= 0, y, x) if padded else y

        unroll = min(self.e.unroll, len(layers_H))
        layer = checkpointed(layer, self.e.remat, in_scan=unroll == 1, gathered_over=self.use.gathered_over)
        return lax.scan(lambda x, xs: (layer(x, *xs), None), x, (blocks, layers_H), unroll=unroll)[0]

    # ---------------------------------------------------------------- forward and backward of a stage

    def vjp(self, k: jax.Array, m: jax.Array, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """A forward: its output, and the leaves that its backward needs besides the parameters.

        Leaves of the backward function that *are* parameters (JAX returns them unchanged) are not kept; which they
        are is remembered, with the function's structure, to put it together again.
        """
        blocks, keys_b = self.chunk(k), self.keys(m)
        y, pull = jax.vjp(lambda blocks, x: self.stage(blocks, x, k, keys_b), blocks, x)
        leaves, self.pull_structure = jax.tree.flatten(pull)
        params = jax.tree.leaves(blocks)
        self.pull_params = [next((i for i, p in enumerate(params) if p is leaf), None) for leaf in leaves]
        return y, [leaf for leaf, i in zip(leaves, self.pull_params, strict=True) if i is None]

    def forward(self, c: Tree, row: Tree) -> tuple[jax.Array, list[jax.Array]]:
        """Go forward: this stage's output, and the ring with what its backward needs."""
        (m, k), slot = row["forward"][self.stage_index], row["forward_slot"][self.stage_index]
        x = self.stage_input(c, row)
        y, kept = self.when(m >= 0, lambda: self.vjp(k, m, x))
        return y, slots.write(c["ring"], kept, slot)

    def stage_input(self, c: Tree, row: Tree) -> jax.Array:
        """What this stage's forward starts from: the embedding, or what the stage before has sent."""
        m, k = row["forward"][0]
        embedded = self.when((m >= 0) & (k == 0), lambda: self.embed(self.rest, m))
        first = (self.stage_index == 0) & (row["forward"][self.stage_index, 1] == 0)
        return jnp.where(first, embedded, c["act"])

    def backward(self, ring: list[jax.Array], row: Tree, gy: jax.Array) -> tuple[Tree, jax.Array]:
        """Go backward: the gradients of this chunk's parameters (zero where idle) and of the stage's input."""
        (m, k), slot = row["backward"][self.stage_index], row["backward_slot"][self.stage_index]

        def work() -> tuple[Tree, jax.Array]:
            params, kept = jax.tree.leaves(self.chunk(k)), iter(slots.read(ring, slot))
            leaves = [next(kept) if i is None else params[i] for i in self.pull_params]
            return jax.tree.unflatten(self.pull_structure, leaves)(gy)

        grads, gx = self.when(m >= 0, work)
        return jax.tree.map(lambda g: jnp.where(m >= 0, g, 0), grads), gx

    def when(self, active: jax.Array, work: Callable[[], Tree]) -> Tree:
        """The work; or, where idle work is skipped and this is idle, zeros of its kind."""
        return lax.cond(active, work, lambda: _zeros_of(work)) if self.e.skip_idle else work()

    # ---------------------------------------------------------------- what all stages do together

    def head(self, outputs: list[jax.Array], row: Tree) -> tuple[Sums, Tree, jax.Array]:
        """The microbatch that leaves the pipeline: its sums, and the gradients of head and activations, or zeros."""
        m, slot = row["backward"][-1, 0], row["output_read"]
        last = self.stage_index == self.table.stages - 1
        x = psum(jnp.where(last & (slot >= 0), slots.read(outputs, slot)[0], 0), PIPE)
        loss_and_grads = jax.value_and_grad(self.head_loss, argnums=(0, 1), has_aux=True)
        (_, sums), (rest, gx) = self.when(slot >= 0, lambda: loss_and_grads(self.rest, x, m))
        return jax.tree.map(lambda value: jnp.where(slot >= 0, value, 0), (sums, rest, gx))

    def embedding_grads(self, gx: jax.Array, row: Tree) -> Tree:
        """Gradients of the embedding from that of the first stage's input, or zeros."""
        m, k = row["backward"][0]
        starts = (m >= 0) & (k == 0)
        gx = psum(jnp.where((self.stage_index == 0) & starts, gx, 0), PIPE)
        return self.when(starts, lambda: jax.vjp(lambda rest: self.embed(rest, m), self.rest)[1](gx)[0])

    # ---------------------------------------------------------------- ticks

    def tick(self, c: Tree, row: Tree, *, phase: Phase, head: bool) -> tuple[Tree, None]:
        """One tick. Gradients are sent first and travel under the forward, activations travel under the backward."""
        new = dict(c)
        gy = shift(c["gx"], PIPE, -1) if phase.backward else c["gx"]
        if phase.forward:
            y, new["ring"] = self.forward(c, row)
            new["outputs"] = slots.write(c["outputs"], [y], row["output_written"])
            new["act"] = shift(y, PIPE, 1)
        if phase.backward:
            if head:
                sums, rest, g_out = self.head(new["outputs"], row)
                new["sums"] = _add(new["sums"], sums)
                new["rest"] = _add(new["rest"], rest)
                leaves_pipe = (self.stage_index == self.table.stages - 1) & (row["output_read"] >= 0)
                gy = jnp.where(leaves_pipe, g_out, gy)
            grads, new["gx"] = self.backward(new["ring"], row, gy)
            new["blocks"] = self.add_to_chunk(new["blocks"], grads, row["backward"][self.stage_index, 1])
            new["rest"] = _add(new["rest"], self.embedding_grads(new["gx"], row))
        # Without the barrier XLA for GPUs moves the forward message into the next tick, where the forward waits for it.
        new["act"], new["gx"] = lax.optimization_barrier((new["act"], new["gx"]))
        return _of_kind(new, c), None

    def add_to_chunk(self, total: Tree, grads: Tree, k: jax.Array) -> Tree:
        """Add one chunk's gradients to those of all chunks of this stage."""
        start = jnp.maximum(k, 0) * self.e.stacking.height

        def add(total: jax.Array, g: jax.Array) -> jax.Array:
            old = lax.dynamic_slice_in_dim(total, start, len(g))
            return lax.dynamic_update_slice_in_dim(total, old + g.astype(total.dtype), start, 0)

        return jax.tree.map(add, total, grads)

    def rows(self) -> dict[str, np.ndarray]:
        """The table, tick by tick. Idle forwards write where nothing is; only an idle read is -1."""
        t = self.table
        stages = [slots.idle_slots(t.forward_slot[:, s], t.backward_slot[:, s]) for s in range(t.stages)]
        return {
            "forward": t.forward,
            "backward": t.backward,
            "forward_slot": np.stack(stages, axis=1),
            "backward_slot": t.backward_slot,
            "output_written": slots.idle_slots(*t.output_slot.T),
            "output_read": t.output_slot[:, 1],
        }

    def train(self) -> tuple[Sums, Tree, Tree]:
        """Run the table: sums over tokens, gradients of the blocks, gradients of the rest."""
        nothing, rows = jnp.int32(0), self.rows()
        kept = _zeros_of(lambda: self.vjp(nothing, nothing, self.first_x)[1])
        accumulator = lambda p: jnp.zeros_like(p, dtype=jnp.promote_types(p.dtype, jnp.float32))
        c = {
            "act": self.first_x,
            "gx": self.first_x,
            "ring": slots.buffers(kept, rows["forward_slot"].max() + 1),
            "outputs": slots.buffers([self.first_x], rows["output_written"].max() + 1),
            "sums": self.no_sums,
            "blocks": jax.tree.map(accumulator, self.blocks),
            "rest": jax.tree.map(accumulator, self.rest),
        }
        for phase in self.table.phases:
            head = bool((rows["output_read"][phase.start : phase.stop] >= 0).any())
            ticks = {name: jnp.asarray(table[phase.start : phase.stop]) for name, table in rows.items()}
            c, _ = lax.scan(partial(self.tick, phase=phase, head=head), c, ticks)
        return c["sums"], c["blocks"], c["rest"]

    def evaluate(self) -> Sums:
        """Run the table's forwards: sums over tokens."""

        def tick(c: Tree, row: Tree) -> tuple[Tree, None]:
            m, k = row["forward"][self.stage_index]
            x = self.stage_input(c, row)
            y = self.when(m >= 0, lambda: self.stage(self.chunk(k), x, k, None))
            m, k = row["forward"][-1]
            done = (m >= 0) & (k == self.table.chunks - 1)
            last = self.stage_index == self.table.stages - 1
            out = psum(jnp.where(last & done, y, 0), PIPE)
            sums = self.when(done, lambda: self.head_loss(self.rest, out, m)[1])
            sums = jax.tree.map(lambda value: jnp.where(done, value, 0), sums)
            new = {"act": shift(y, PIPE, 1), "sums": _add(c["sums"], sums)}
            return _of_kind(new, c), None

        stop = max(phase.stop for phase in self.table.phases if phase.forward)
        rows = {"forward": jnp.asarray(self.table.forward[:stop])}
        return lax.scan(tick, {"act": self.first_x, "sums": self.no_sums}, rows)[0]["sums"]


def _zeros_of(work: Callable[[], Tree]) -> Tree:
    """Zeros of the shapes, dtypes and varying axes of what `work` returns."""
    axes: list[frozenset[str]] = []

    def traced() -> Tree:
        out = work()
        axes.extend(varying_axes(leaf) for leaf in jax.tree.leaves(out))
        return out

    shapes, structure = jax.tree.flatten(jax.eval_shape(traced))
    zeros = [varying(jnp.zeros(s.shape, s.dtype), tuple(a)) for s, a in zip(shapes, axes, strict=True)]
    return jax.tree.unflatten(structure, zeros)


def _of_kind(new: Tree, old: Tree) -> Tree:
    """The new carry of a scan with the types of the old."""
    return jax.tree.map(lambda n, o: varying(n, tuple(varying_axes(o))), new, old)


def _add(total: Tree, new: Tree) -> Tree:
    return jax.tree.map(lambda t, n: t + n.astype(t.dtype), total, new)
