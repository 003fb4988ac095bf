"""From the config's optimizer section to an optax transformation, and where its state lives.

The update runs in global view (plain `jit` on global arrays), so any optax transformation is right on every layout;
what a layout needs is only a `PartitionSpec` for each leaf of the state, which `opt_state_specs` derives.

Rows that fill arrays up, of vocabularies and of stacks on uneven stages, must change nothing. Gradients are 0 there,
and so is every direction that looks at one element at a time. What looks at more looks at one layer at a time in
stacks, and is told how many of a table's rows are padding.

Every optimizer is the same chain: clip the global norm (`clip_norm`), the optimizer's own direction, decoupled weight
decay on matrices, times minus the learning rate. With direction u and schedule η the parameters become
θ ← θ - η(t)·(u + weight_decay·θ), t counting the steps applied so far. Decay is decoupled for SGD too
(arXiv:1711.05101, SGDW): it is added after the momentum, never accumulated in it.

Letters: L layers (stacked leaves under the top-level key `blocks`), I input dim, O output dim of a matrix.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, KeyPath

from jaxpar.config import OptimizerConfig
from jaxpar.zero import widened

Schedule = Callable[[Any], Any]

FACTORED_FROM = 128  # the smaller dim of matrices of which Adafactor keeps row and column means: optax's default
SMALLEST_RMS = 1e-3  # ε2 of arXiv:1804.04235, section 8: a parameter of zeros still moves
ADAMW_UPDATE_RMS = 0.2  # root mean square of an Adam update, to which Muon's is scaled: arXiv:2502.16982, section 2.2


def make_schedule(optimizer: OptimizerConfig) -> Schedule:
    """Build the learning rate as a function of the number of optimizer steps applied before.

    All schedules warm up linearly: step t < warmup_steps uses learning_rate · (t + 1) / (warmup_steps + 1), so that the
    first step already learns something, and step `warmup_steps` has the full rate. Then, up to `decay_steps`:

    - `constant`: stays.
    - `warmup_cosine`: half a cosine from learning_rate to learning_rate · final_learning_rate_fraction.
    - `warmup_linear`: a line between the same two values.
    - `warmup_stable_decay`: stays, then a line over the last decay_fraction · decay_steps steps (arXiv:2405.18392).

    From `decay_steps` on the final value stays.

    Args:
        optimizer: the section of a whole config, which has filled `decay_steps` in; warmup_steps < decay_steps.

    Returns:
        A function from a step count (int or i32[]) to the learning rate. It can be traced.

    Example:
        >>> from jaxpar.config import OptimizerConfig
        >>> section = OptimizerConfig(learning_rate=0.1, schedule="warmup_linear", warmup_steps=4, decay_steps=10)
        >>> [round(float(make_schedule(section)(t)), 4) for t in (0, 4, 7, 10)]
        [0.02, 0.1, 0.055, 0.01]
    """
    peak, warmup_steps = optimizer.learning_rate, optimizer.warmup_steps
    final = peak * optimizer.final_learning_rate_fraction
    pieces, boundaries = [], []
    if warmup_steps:
        pieces.append(optax.linear_schedule(peak / (warmup_steps + 1), peak, warmup_steps))
        boundaries.append(warmup_steps)
    if optimizer.schedule == "constant":
        pieces.append(optax.constant_schedule(peak))
        return _in_full_precision(optax.join_schedules(pieces, boundaries))
    assert optimizer.decay_steps > warmup_steps, "a whole Config fills decay_steps in, and checks it"
    decay_steps = optimizer.decay_steps - warmup_steps
    if optimizer.schedule == "warmup_cosine":
        pieces.append(optax.cosine_decay_schedule(peak, decay_steps, alpha=optimizer.final_learning_rate_fraction))
    elif optimizer.schedule == "warmup_linear":
        pieces.append(optax.linear_schedule(peak, final, decay_steps))
    else:
        share = round(optimizer.decay_steps * optimizer.decay_fraction)
        falling_steps = min(max(share, 1), decay_steps)
        if falling_steps < decay_steps:
            pieces.append(optax.constant_schedule(peak))
            boundaries.append(optimizer.decay_steps - falling_steps)
        pieces.append(optax.linear_schedule(peak, final, falling_steps))
    return _in_full_precision(optax.join_schedules(pieces, boundaries))


def _in_full_precision(schedule: Schedule) -> Schedule:
    """The schedule, computed in float64 where JAX has it: from a count of 32 bits optax computes in float32."""

    def rate(count: Any) -> jax.Array:
        steps = jnp.asarray(count, float)
        return jnp.asarray(schedule(steps), steps.dtype)

    return rate


def make_optimizer(
    optimizer: OptimizerConfig, schedule: Schedule, padding: Mapping[str, int] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Build the optax transformation of the config.

    The directions u (the decay and the learning rate come after, as the module says):

    - `adamw`: Adam with b1, b2, eps.
    - `lion`: sign(b1·m + (1 - b1)·g), then m ← b2·m + (1 - b2)·g (arXiv:2302.06675).
    - `adafactor`: factored second moments for matrices with both dims ≥ 128, update clipped to root mean square 1,
      scaled by the parameter's own root mean square (arXiv:1804.04235, without momentum). Statistics are per layer.
    - `muon`: Nesterov momentum, orthogonalised by Newton-Schulz, for every matrix inside `blocks`, each layer on its
      own, scaled by 0.2·sqrt(max(I, O)) so that one learning rate and decay serve both it and Adam (arXiv:2502.16982).
      All other parameters: Adam with b1, b2, eps.
    - `sgd`: the gradient, or with `momentum` the heavy ball m ← momentum·m + g, u = m.

    Args:
        optimizer: the section of a config.
        schedule: what `make_schedule` returns. Its argument is the transformation's own count: steps applied, so a
            step that was skipped for a non-finite gradient does not advance it.
        padding: how many rows at the end of a parameter are padding, by name: what `jaxpar.layers.padding` gives.

    Returns:
        A transformation for params that are a nested dict with stacked layers under `blocks`. Its update takes
        `global_norm`, the norm of all gradients, which is needed where it sees only a part of them; by default it is
        that of what it sees.
    """
    clip = [] if optimizer.clip_norm is None else [clip_by_global_norm(optimizer.clip_norm)]
    decay = [optax.add_decayed_weights(optimizer.weight_decay, mask=matrices)] if optimizer.weight_decay else []
    chain = optax.chain(*clip, _direction(optimizer, padding or {}), *decay, optax.scale_by_learning_rate(schedule))
    return optax.with_extra_args_support(chain)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scale gradients down to a norm of `max_norm`, as optax does, from a norm that may be given (`global_norm`)."""

    def update(updates: Any, state: Any, params: Any = None, *, global_norm: Any = None, **_: Any) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if global_norm is None else global_norm
        scaled = lambda u: jnp.where(norm < max_norm, u, (u / norm.astype(u.dtype)) * max_norm)
        return jax.tree.map(scaled, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _direction(optimizer: OptimizerConfig, padding: Mapping[str, int]) -> optax.GradientTransformation:
    """What the optimizer makes of the gradient, before decay and learning rate."""
    adam = optax.scale_by_adam(optimizer.b1, optimizer.b2, optimizer.eps)
    if optimizer.name == "adamw":
        return adam
    if optimizer.name == "lion":
        return optax.scale_by_lion(optimizer.b1, optimizer.b2)
    if optimizer.name == "adafactor":
        adafactor = _adafactor(padding)
        labels = _by_path(lambda path, leaf: "layers" if _stacked(path) else "rest")
        return optax.partition({"layers": _each_layer(adafactor), "rest": adafactor}, labels)
    if optimizer.name == "muon":
        dimensions = _by_path(lambda path, leaf: optax.contrib.MuonDimensionNumbers(-2, -1))
        scale = optax.stateless(lambda updates, _: jax.tree.map(_match_adamw_rms, updates))
        muon = optax.contrib.scale_by_muon(beta=optimizer.momentum, weight_dimension_numbers=dimensions)
        labels = _by_path(lambda path, leaf: "muon" if _stacked(path) and leaf.ndim == 3 else "adam")
        return optax.partition({"muon": optax.chain(muon, scale), "adam": adam}, labels)
    return optax.trace(optimizer.momentum) if optimizer.momentum else optax.identity()


def _adafactor(padding: Mapping[str, int]) -> optax.GradientTransformation:
    """Adafactor's direction, as it is for the rows that are no padding.

    Of each matrix optax keeps the mean square of each row and of each column. Rows of zeros make the means of columns
    smaller, and the mean of all by the same factor, by which they are divided: where there is a gradient the quotient
    stays what it is. But whether there are enough rows to keep means at all, and the root mean squares of update and
    parameter, have to be of the real rows.
    """

    def shape(path: KeyPath, leaf: jax.Array) -> tuple[int, ...]:
        filled = padding.get(jax.tree_util.keystr(path, simple=True, separator="/"), 0)
        return (leaf.shape[0] - filled, *leaf.shape[1:]) if filled else leaf.shape

    def factored(path: KeyPath, leaf: jax.Array) -> str:
        *_, second, _ = 0, 0, *sorted(shape(path, leaf))
        return "factored" if second >= FACTORED_FROM else "whole"

    def scaled(path: KeyPath, update: jax.Array, param: jax.Array) -> jax.Array:
        elements = math.prod(shape(path, param))
        rms = lambda x: jnp.sqrt(jnp.square(widened(x)).sum() / elements)
        clipped = update / jnp.maximum(rms(update), 1.0)
        return (clipped * jnp.maximum(rms(param), SMALLEST_RMS)).astype(update.dtype)

    means = optax.scale_by_factored_rms(min_dim_size_to_factor=FACTORED_FROM)
    squares = optax.scale_by_factored_rms(factored=False)
    normalise = optax.partition({"factored": means, "whole": squares}, _by_path(factored))
    scale = optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(scaled, updates, params))
    return optax.chain(normalise, scale)


def matrices(params: Any) -> Any:
    """Mark what weight decay applies to: leaves of rank ≥ 2 not counting the stacked layer dim.

    Args:
        params: a nested dict of arrays or shapes; leaves under the top-level key `blocks` are stacked by layer.

    Returns:
        The same tree with True for matrices, embedding tables included, and False for norms and biases.

    Example:
        >>> import jax.numpy as jnp
        >>> weight, bias = jnp.zeros((6, 4, 8)), jnp.zeros((6, 8))
        >>> matrices({"blocks": {"up": {"weight": weight, "bias": bias}}, "norm": {"scale": jnp.zeros(4)}})
        {'blocks': {'up': {'bias': False, 'weight': True}}, 'norm': {'scale': False}}
    """
    return _by_path(lambda path, leaf: leaf.ndim - _stacked(path) >= 2)(params)


def _by_path(label: Callable[[KeyPath, Any], Any]) -> Callable[[Any], Any]:
    return lambda params: jax.tree_util.tree_map_with_path(label, params)


def _stacked(path: KeyPath) -> bool:
    return path[0] == DictKey("blocks")


def _match_adamw_rms(update_LIO: jax.Array) -> jax.Array:
    return update_LIO * (ADAMW_UPDATE_RMS * max(update_LIO.shape[-2:]) ** 0.5)


def _each_layer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply `inner` to each layer of stacked leaves on its own; its state gets a leading layer dim, but for counters.

    For transformations that look at a whole leaf (its root mean square, its two largest dims), which would otherwise
    mix layers that an unstacked model treats apart. Where there are no such leaves it does nothing.
    """

    def init(params: Any) -> Any:
        if not jax.tree.leaves(params):
            return optax.EmptyState()
        axes = _layer_dims(jax.eval_shape(jax.vmap(inner.init), params))
        return jax.vmap(inner.init, out_axes=axes)(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if not jax.tree.leaves(updates):
            return updates, state
        axes = _layer_dims(state)
        return jax.vmap(inner.update, in_axes=(0, axes, 0), out_axes=(0, axes))(updates, state, params)

    return optax.GradientTransformation(init, update)


def _layer_dims(state: Any) -> Any:
    """Counters are the same for all layers, however many rows a layout's stacks have."""
    return jax.tree.map(lambda leaf: None if jnp.issubdtype(leaf.dtype, jnp.integer) else 0, state)


def opt_state_specs(optimizer_tx: optax.GradientTransformation, params_shapes: Any, param_specs: Any) -> Any:
    """Lay out the optimizer state like the parameters it belongs to.

    Args:
        optimizer_tx: the transformation.
        params_shapes: the parameters as arrays or `jax.ShapeDtypeStruct`, global shapes.
        param_specs: the same tree of `PartitionSpec`; with other specs than the parameters' own (ZeRO stage 1) the
            state is laid out by those.

    Returns:
        A tree like `optimizer_tx.init(params)` of `PartitionSpec`. A leaf that stands at a parameter's path and has its
        shape gets that parameter's spec. A factored statistic, the shape less one dim, gets the spec less that dim;
        where several dims could be the missing one, a dim keeps its axes only if all readings agree. Counters and
        everything else is replicated.

    Example:
        >>> shapes = {"head": {"weight": jax.ShapeDtypeStruct((64, 8), "float32")}}
        >>> specs = {"head": {"weight": PartitionSpec("tensor", None)}}
        >>> opt_state_specs(optax.scale_by_adam(), shapes, specs).mu == specs
        True
    """
    shapes = dict(jax.tree_util.tree_flatten_with_path(params_shapes)[0])
    specs = dict(jax.tree_util.tree_flatten_with_path(param_specs, is_leaf=lambda x: isinstance(x, PartitionSpec))[0])

    def spec(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        for start in range(len(path)):  # the longest suffix first: blocks/norm/scale ends with norm/scale too
            if path[start:] in shapes:
                return _spec_for(leaf.shape, shapes[path[start:]].shape, specs[path[start:]])
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, jax.eval_shape(optimizer_tx.init, params_shapes))


def _spec_for(shape: tuple[int, ...], param_shape: tuple[int, ...], param_spec: PartitionSpec) -> PartitionSpec:
    if shape == param_shape:
        return param_spec
    padded = tuple(param_spec) + (None,) * (len(param_shape) - len(param_spec))
    readings = [
        padded[:dim] + padded[dim + 1 :]
        for dim in range(len(param_shape))
        if param_shape[:dim] + param_shape[dim + 1 :] == shape
    ]
    if not readings:
        return PartitionSpec()
    return PartitionSpec(*(axes[0] if len(set(axes)) == 1 else None for axes in zip(*readings, strict=True)))
