"""What a model must provide to be trained by jaxpar, and how it is run.

A model is an `nnx.Module` with an embedding, a stack of equal blocks and a head. Ours (`Transformer`) is one;
any module with these four names trains, verifies and checkpoints the same way.

Letters: B batch, T tokens, D width, V vocabulary, L layers; a lower-case letter is this device's block.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxpar.layers.dropout import fold_in
from jaxpar.layers.layout import STACK

Remat = str | Sequence[str]


class LanguageModel(Protocol):
    """The protocol.

    Everything in the model that is learned is an `nnx.Param`. Other variables and NumPy arrays (a rotary table, a
    mask) are constants: made by the model's maker at each start, whole on every device, in the dtype that they are
    made in, and in no checkpoint. There is no other state: what the model assigns to when it is called is refused.

    Attributes:
        blocks: one module whose arrays have a leading dim L, made by `stack`. Layers are in model order.
    """

    blocks: nnx.Module

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """Token ids `i32[B, T]` to activations, `[B, T, D]` by convention; any shape that `block` keeps."""
        ...

    def block(self, layer: Any, x: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        """Apply one layer.

        Args:
            layer: the module that `stack` was given the maker of, with one layer's parameters.
            x: activations.
            keys_B: in training one PRNG key per example, different in each layer and step, the same on every layout;
                None outside training. A block without dropout ignores it.

        Returns:
            Activations of the same shape and dtype.
        """
        ...

    def head(self, x: jax.Array) -> jax.Array:
        """Activations to logits `[B, T, V]`, in block view this device's block of V, or all of V on each device.

        V is the config's `vocab_size`; or that rounded up to a multiple of `vocab_multiple`, and then the logits from
        `vocab_size` on are -inf, so that they get no probability.
        """
        ...


def stack(make_layer: Callable[[nnx.Rngs], nnx.Module], layers: int, rngs: nnx.Rngs) -> Any:
    """A module whose parameters hold `layers` layers in a leading dim.

    Layer i's weights depend on the seed and on i, and not on how many layers there are.

    Args:
        make_layer: builds one layer from random number streams.
        layers: L, at least 1.
        rngs: source of the initial weights.

    Example:
        >>> from jaxpar.layers import ColumnParallelLinear
        >>> blocks = stack(lambda rngs: ColumnParallelLinear(4, 8, rngs=rngs), 3, nnx.Rngs(0))
        >>> blocks.weight.shape
        (3, 4, 8)
    """
    key = rngs.params()
    keys_L = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(layers))
    return nnx.vmap(lambda key: make_layer(nnx.Rngs(key)))(keys_L)


def forward(
    model: Any,
    tokens_BT: jax.Array,
    keys_B: jax.Array | None = None,
    *,
    remat: Remat = "none",
    unroll: int = 1,
) -> jax.Array:
    """Logits of a `LanguageModel`, its blocks run by `lax.scan`.

    Args:
        model: the model, in global view or with this device's blocks of its parameters.
        tokens_BT: `i32[B, T]`.
        keys_B: one PRNG key per example for dropout; None: no dropout.
        remat: what the forward pass keeps of each layer for the backward pass: `"none"` recomputes nothing,
            `"dots"` keeps results of matrix multiplications, `"full"` keeps only the layer's input; a list of
            names keeps those (`query`, `key`, `value`, `attention_context`, `attention_out`, `mlp_hidden`, `mlp_out`).
        unroll: layers per iteration of the scan.

    Returns:
        What the model's `head` returns.
    """
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return run(model, params, tokens_BT, keys_B, WHOLE, remat=remat, unroll=unroll)


class Use(NamedTuple):
    """How parameters become what the model computes with, just before it does.

    Attributes:
        layer: one layer's entry in the stack to that layer's parameters; called inside the layer's remat.
        rest: the entries outside the stack to those parameters; called once for the embedding and once for the head.
        gathered_over: the axis over which `layer` gathers parameters, which are then gathered again for the backward
            pass and not kept; None where it does not.
    """

    layer: Callable[[Any], Any]
    rest: Callable[[Any], Any]
    gathered_over: str | None = None


WHOLE = Use(lambda params: params, lambda params: params)
"""Parameters are used as they come."""


def run(
    model: Any,
    params: dict[str, Any],
    tokens_BT: jax.Array,
    keys_B: jax.Array | None,
    use: Use,
    *,
    remat: Remat,
    unroll: int,
) -> jax.Array:
    """`forward` with parameters that are made ready for use on the way; `model` gives the structure alone."""
    make_layer = layer_maker(model.blocks)
    stack = params[STACK]
    rest = {name: tree for name, tree in params.items() if name != STACK}

    def layer(x: jax.Array, entry: Any, index: jax.Array) -> jax.Array:
        return model.block(make_layer(use.layer(entry), index), x, fold_in(keys_B, index))

    layer = checkpointed(layer, remat, in_scan=unroll == 1, gathered_over=use.gathered_over)
    layers = jax.tree.leaves(stack)[0].shape[0]
    x, _ = lax.scan(
        lambda x, xs: (layer(x, *xs), None),
        outside_stack(model, use.rest(rest)).embed(tokens_BT),
        (stack, jnp.arange(layers)),
        unroll=min(unroll, layers),
    )
    return outside_stack(model, use.rest(rest)).head(x)


def outside_stack(model: Any, rest: dict[str, Any]) -> Any:
    """The model with these parameters outside its blocks, for `embed` and `head`."""
    graph, params, constants = nnx.split(model, nnx.Param, ...)
    unused = nnx.to_pure_dict(params)[STACK]
    return nnx.merge(graph, rest | {STACK: unused}, jax.tree.map(jnp.asarray, constants))


def layer_maker(blocks: Any) -> Callable[[Any, Any], Any]:
    """`(params, index) -> layer`: from one layer's parameters, and its number for its constants."""
    graph, _, constants = nnx.split(blocks, nnx.Param, ...)
    return lambda params, index: nnx.merge(graph, params, jax.tree.map(lambda c: _row(c, index), constants))


def _row(constant_L: Any, index: Any) -> jax.Array:
    """One layer's row; where all layers have the same, the first, so that a program holds only that."""
    if isinstance(constant_L, np.ndarray) and (constant_L == constant_L[:1]).all():
        return jnp.asarray(constant_L[0])
    return jnp.asarray(constant_L)[index]


def checkpointed(
    layer: Callable[..., jax.Array], remat: Remat, *, in_scan: bool, gathered_over: str | None = None
) -> Callable[..., jax.Array]:
    """Wrap one layer with a remat policy by name (see `forward`).

    Args:
        layer: the function of one layer.
        remat: the policy.
        in_scan: the call is the whole body of a scan, where XLA cannot undo the recomputation by merging it with
            the forward pass; otherwise barriers keep it from that.
        gathered_over: the axis over which the layer gathers its parameters; they are not kept under any policy.
    """
    policies = jax.checkpoint_policies
    if remat == "none" and gathered_over is None:
        return layer
    if remat == "none":
        policy = lambda primitive, *_, **settings: not _gathers(primitive.name, settings, gathered_over)
    elif remat == "dots":
        policy = policies.dots_with_no_batch_dims_saveable
    elif remat == "full":
        policy = policies.nothing_saveable
    else:
        policy = policies.save_only_these_names(*remat)
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_scan)


def _gathers(primitive: str, settings: dict[str, Any], axis: str | None) -> bool:
    """Whether an operation gathers over the axis, itself or inside a function with a gradient of its own."""
    if primitive.startswith("all_gather"):
        return axis in settings["axis_name"]
    inner = settings["call_jaxpr"].eqns if "call_jaxpr" in settings else ()
    return any(_gathers(e.primitive.name, e.params, axis) for e in inner)


def cast(params: Any, dtype: Any) -> Any:
    """Parameters in the dtype of the computation."""
    return jax.tree.map(lambda p: p.astype(dtype), params)
