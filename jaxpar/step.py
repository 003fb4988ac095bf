"""One training step: loss and gradients in block view, the optimizer in global view.

The layout is chosen while the step is built; the step itself has no branch on it. Letters: B batch (sequences),
T tokens, M microbatches; a lower-case letter is this device's block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import psum
from jaxpar.collectives.choosing import Chosen, choose_reduction
from jaxpar.collectives.in_order import in_order
from jaxpar.config import Config, choose_implementation
from jaxpar.gradients import Batch, Params, in_block_view, layer_by_layer, partition_of
from jaxpar.layers import padding, specs
from jaxpar.mesh import DATA, PIPE, batch_spec, shard_bytes
from jaxpar.models import Facts, Transformer, facts_of
from jaxpar.models.check import MakeModel
from jaxpar.optimizer import make_optimizer, make_schedule, opt_state_specs
from jaxpar.pipeline.stacking import Stacking
from jaxpar.wide_sums import wide_sums
from jaxpar.zero import Replicas, Zero, widened

Leaf = Any  # an array; or its shape, spec or sharding, in trees of the same structure


class TrainState(NamedTuple):
    """Everything that a step changes. All of it is saved in a checkpoint.

    Attributes:
        step: i32[], steps done, skipped ones included; also the position in the data.
        params: nested dict of arrays, `param_dtype`, laid out as their layers say.
        opt_state: the optimizer's, laid out like the parameters it belongs to.
        skipped: i32[], steps not applied because the loss or a gradient was not finite.
        skipped_in_a_row: i32[], how many of them came last, one after the other.
    """

    step: Leaf
    params: Params
    opt_state: Any
    skipped: Leaf
    skipped_in_a_row: Leaf

    def tried_anew(self, max_bad_steps: int) -> "TrainState":
        """The state to go on from: after a run that bad steps stopped, they are counted from 0 again."""
        stopped = int(self.skipped_in_a_row) >= max_bad_steps
        return self._replace(skipped_in_a_row=np.int32(0)) if stopped else self


@dataclass(frozen=True)
class Program:
    """The compiled-on-first-use functions of one config on one mesh.

    Attributes:
        abstract_state: shapes, dtypes and shardings of the state, for checkpoints and for compiling without data.
        batch_sharding: of every array in a batch, `[B/data, T]`.
        stacking: which layers the rows of stacked parameters hold.
        facts: what the model has.
        padding: how many rows at the end of parameters fill them up, by name.
        abstract_grads: likewise of the gradients, as they are summed over microbatches before `data`.
        grad_reduce: how they are summed over `data`, and why so.
        zero: what the replicas keep in parts.
        saved_state: like `abstract_state`, with all stacks in model order: what checkpoints hold.
        to_saved: `(state) -> state` in model order.
        from_saved: its inverse.
        init: `() -> TrainState`, drawn from the seed, the same on every layout.
        loss_and_grads: `(params, batch, step, first_row=0) -> (means, grads)`. Means over the unmasked tokens of the
            batch: `loss` and what else is minimised, and `tokens`, their number (`jaxpar.losses.means`). The gradients
            of their sum are like params, in float32 or wider. `first_row` is the first row's number in the batch of
            the step (dropout depends on it). Without any token all are 0, and the train step goes on by momentum and
            decay.
        train_step: `(state, batch) -> (state, metrics)`; the state is donated.
        train_step_and_grads: the same, `(state, batch) -> (state, metrics, grads)`, for checks; nothing is donated.
        eval_step: `(params, batch)` to `loss`, the cross-entropy summed over tokens, and `tokens`, their number.
        schedule: learning rate by number of applied steps.
    """

    mesh: Mesh
    abstract_state: TrainState
    batch_sharding: NamedSharding
    stacking: Stacking
    facts: Facts
    padding: dict[str, int]
    abstract_grads: Params
    grad_reduce: Chosen
    zero: Zero
    saved_state: TrainState
    to_saved: Callable[[TrainState], TrainState]
    from_saved: Callable[[TrainState], TrainState]
    init: Callable[[], TrainState]
    loss_and_grads: jax.stages.Wrapped
    train_step: jax.stages.Wrapped
    train_step_and_grads: jax.stages.Wrapped
    eval_step: jax.stages.Wrapped


def model_maker(config: Config, platform: str) -> MakeModel:
    """The function that builds the config's own model from random number streams."""
    implementation, _ = choose_implementation(config.model.attn_implementation, config.train.compute_dtype, platform)
    return lambda rngs: Transformer(
        config.model,
        sequence_parallel=config.parallel.sequence_parallel,
        implementation=implementation,
        param_dtype=config.train.param_dtype,
        rngs=rngs,
    )


def make_train_step(
    loss_and_grads: Callable,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Callable,
    landed: Params,
    max_bad_steps: int,
) -> Callable:
    """The step, in global view. A step whose loss or gradient is not finite changes nothing but the counters.

    After `max_bad_steps` of them in a row a step changes nothing at all, and so does one whose `tokens` are NaN because
    a process refused its rows (see `jaxpar.losses.count`). The loop, which never waits for the step that it has begun,
    reads of either when one more is begun; and the state is still that of before.

    Args:
        loss_and_grads: see `Program`.
        optimizer: updates parameters laid out as `landed`, like the gradients; what is stored otherwise is sliced
            before (which sends nothing) and gathered afterwards.
        schedule: learning rate by number of applied steps.
        landed: shardings.
        max_bad_steps: at least 1.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array], Params]:
        means, grads = loss_and_grads(state.params, batch, state.step)
        grad_norm = optax.tree.norm(grads)
        goes_on = (state.skipped_in_a_row < max_bad_steps) & ~jnp.isnan(means["tokens"])
        finite = jnp.isfinite(means["loss"]) & jnp.isfinite(grad_norm)
        params = lax.with_sharding_constraint(state.params, landed)
        updates, opt_state = optimizer.update(grads, state.opt_state, params, global_norm=grad_norm)
        applied = optax.apply_updates(params, updates), opt_state
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite & goes_on, new.astype(old.dtype), old), applied, (params, state.opt_state)
        )
        new = TrainState(
            step=state.step + goes_on,
            params=lax.with_sharding_constraint(params, landed),
            opt_state=opt_state,
            skipped=state.skipped + (~finite & goes_on),
            skipped_in_a_row=jnp.where(finite & goes_on, 0, state.skipped_in_a_row + goes_on),
        )
        metrics = {
            **means,
            "grad_norm": grad_norm,
            "learning_rate": schedule(state.step - state.skipped),
            "skipped": new.skipped,
            "skipped_in_a_row": new.skipped_in_a_row,
        }
        return new, metrics, grads

    return train_step


def build(config: Config, mesh: Mesh, make_model: MakeModel | None = None) -> Program:
    """Build the functions that train a config on a mesh.

    Args:
        config: resolved (no axis is -1).
        mesh: with the axes data, pipe, tensor.
        make_model: builds the model, a `LanguageModel`, from random number streams; by default the config's own.

    Raises:
        InputError: when the model is not what the config says or cannot be trained (`jaxpar.models.check_model`), or a
            parameter cannot be split as its layout says.
    """
    platform = mesh.devices.flat[0].platform
    make_model = make_model or model_maker(config, platform)
    facts = facts_of(config, make_model)
    stacking = Stacking.of(partition_of(config))
    schedule = make_schedule(config.optimizer)
    filled = padding(facts.model)
    optimizer = make_optimizer(config.optimizer, schedule, filled)

    def init() -> TrainState:
        model = make_model(nnx.Rngs(config.train.seed))
        params = stacking.arrange_params(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, params, optimizer.init(params), zero, zero)

    def from_saved(state: TrainState) -> TrainState:
        return stacking.arrange(state)._replace(params=stacking.arrange_params(state.params))

    shapes = jax.eval_shape(init)
    zero = Zero.of(config.parallel.zero, shapes.params, specs(facts.model, mesh), mesh.shape[DATA])
    optimizer_specs = opt_state_specs(optimizer, shapes.params, zero.landed)
    place = lambda spec: NamedSharding(mesh, spec)
    state_shardings = jax.tree.map(place, TrainState(P(), zero.stored, optimizer_specs, P(), P()))
    landed = jax.tree.map(place, zero.landed)
    rows = batch_spec(mesh)
    batch_sharding = place(rows)

    never_whole = zero.stage == 3 or (layer_by_layer(config) and config.parallel.microbatches == 1)
    grad_shapes = jax.eval_shape(partial(jax.tree.map, widened), shapes.params)
    whole_grads = _placed(grad_shapes, jax.tree.map(place, zero.whole))
    chosen = choose_reduction(config.grad_reduce, mesh, shard_bytes(whole_grads))
    replicas = Replicas(zero, chosen.reduction, config.train.compute_dtype)
    grads_of_block, loss_of_block = in_block_view(config, facts.model, stacking, replicas, platform)
    sharded_grads = jax.shard_map(
        in_order(wide_sums(grads_of_block), mesh),
        mesh=mesh,
        in_specs=(zero.stored, rows, P(), P()),
        out_specs=(P(), zero.landed),
    )

    def loss_and_grads(params: Params, batch: Batch, step: jax.Array, first_row: int | jax.Array = 0) -> Any:
        return sharded_grads(params, batch, step, jnp.asarray(first_row, jnp.int32))

    eval_loss = jax.shard_map(
        in_order(wide_sums(lambda params, batch: psum(loss_of_block(params, batch), DATA)), mesh),
        mesh=mesh,
        in_specs=(zero.stored, rows),
        out_specs=P(),
    )
    step_and_grads = make_train_step(loss_and_grads, optimizer, schedule, landed, config.train.max_bad_steps)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        return step_and_grads(state, batch)[:2]

    abstract_state = _placed(shapes, state_shardings)
    saved_shapes = jax.eval_shape(stacking.model_order, shapes)
    saved_shardings = jax.tree.map(_evenly, saved_shapes, state_shardings)
    return Program(
        mesh=mesh,
        abstract_state=abstract_state,
        batch_sharding=batch_sharding,
        stacking=stacking,
        facts=facts,
        padding=filled,
        abstract_grads=_placed(grad_shapes, landed) if never_whole else whole_grads,
        grad_reduce=chosen,
        zero=zero,
        saved_state=_placed(saved_shapes, saved_shardings),
        to_saved=jax.jit(stacking.model_order, out_shardings=saved_shardings),
        from_saved=jax.jit(from_saved, out_shardings=state_shardings),
        init=jax.jit(init, out_shardings=state_shardings),
        loss_and_grads=jax.jit(loss_and_grads),
        train_step=jax.jit(
            train_step,
            in_shardings=(state_shardings, batch_sharding),
            out_shardings=(state_shardings, place(P())),
            donate_argnums=0,
        ),
        train_step_and_grads=jax.jit(
            step_and_grads,
            in_shardings=(state_shardings, batch_sharding),
            out_shardings=(state_shardings, place(P()), landed),
        ),
        eval_step=jax.jit(eval_loss),
    )


def abstract_batch(config: Config, program: Program) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of a batch, to compile a program without data."""
    shape = config.train.global_batch, config.data.sequence_length
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "mask": jnp.bool_}
    return {n: jax.ShapeDtypeStruct(shape, d, sharding=program.batch_sharding) for n, d in dtypes.items()}


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes, shardings
    )


def _evenly(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
    """The sharding, without `pipe` where a stack in model order does not divide over the stages."""
    stack, *dims = sharding.spec or (None,)
    if stack != PIPE or shape.shape[0] % sharding.mesh.shape[PIPE] == 0:
        return sharding
    return NamedSharding(sharding.mesh, P(None, *dims))
