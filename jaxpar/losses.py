"""Cross-entropy over a vocabulary that is split between devices, and what else is minimised beside it.

What is differentiated and what is reported are two things: a penalty is part of the objective, but the loss that people
compare, between runs and with other programs, is the cross-entropy alone.

Letters: B batch, T tokens, V vocabulary; a lower-case letter is this device's block.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives import axis_index, pmax, psum, varying_axes
from jaxpar.mesh import VOCAB_AXES

Sums = dict[str, jax.Array]


def cross_entropy(
    logits_BTv: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array, *, z_loss: float = 0.0
) -> tuple[jax.Array, Sums]:
    """Sum of the negative log likelihoods of unmasked tokens, and how many there are.

    The loss of a run is the sum over the whole global batch divided by the count over the whole global batch (`means`).
    Logits are never gathered: devices exchange the maximum, the sum of exponentials and the target's logit, three
    numbers per token (the scheme of Megatron-LM, arXiv:1909.08053 section 3). Computed in float32 or wider.

    Args:
        logits_BTv: `[B, T, V/(pipe·tensor)]`. In block view the axes of (pipe, tensor) over which the value varies
            are those that V is split over; a head that is whole on every device works as well.
        targets_BT: `i32[B, T]`, the next tokens.
        mask_BT: `[B, T]`, true or 1 where a token counts.
        z_loss: weight of log(Z)² per token, which keeps the normaliser Z near 1 (arXiv:2204.02311, section 5).

    Returns:
        The objective, to be differentiated, and what it is made of, all summed over this device's B and T in float32
        or wider: `loss`, the cross-entropy; `z_loss`, the penalty, where it has a weight; `tokens`, their number.

    Example:
        >>> objective, sums = cross_entropy(jnp.zeros((1, 2, 4)), jnp.array([[3, 0]]), jnp.array([[True, False]]))
        >>> {name: round(float(value), 4) for name, value in sums.items()}  # log 4
        {'loss': 1.3863, 'tokens': 1.0}
    """
    axes = tuple(a for a in VOCAB_AXES if a in varying_axes(logits_BTv))
    logits_BTv = logits_BTv.astype(jnp.promote_types(logits_BTv.dtype, jnp.float32))
    size = logits_BTv.shape[-1]
    top_BT = pmax(lax.stop_gradient(logits_BTv).max(-1), axes)
    local_BT = targets_BT - axis_index(axes) * size
    inside_BT = (local_BT >= 0) & (local_BT < size)
    picked_BT = jnp.take_along_axis(logits_BTv, jnp.clip(local_BT, 0, size - 1)[..., None], axis=-1)[..., 0]
    normaliser_BT, target_logit_BT = psum(
        (jnp.exp(logits_BTv - top_BT[..., None]).sum(-1), jnp.where(inside_BT, picked_BT, 0)), axes
    )
    log_z_BT = jnp.log(normaliser_BT) + top_BT
    parts_BT = {"loss": log_z_BT - target_logit_BT} | ({"z_loss": z_loss * log_z_BT**2} if z_loss else {})
    counts_BT = mask_BT.astype(log_z_BT.dtype)
    parts = {name: jnp.where(counts_BT > 0, part_BT * counts_BT, 0).sum() for name, part_BT in parts_BT.items()}
    objective = sum(parts.values(), start=jnp.zeros((), log_z_BT.dtype))
    return objective, parts | {"tokens": count(targets_BT, mask_BT, log_z_BT.dtype)}


def means(sums: Sums) -> Sums:
    """What `cross_entropy` gives, summed over a whole batch, as means over its tokens; `tokens` stays their number.

    Without any token all means are 0.
    """
    divisor = jnp.maximum(sums["tokens"], 1)
    return {name: value if name == "tokens" else value / divisor for name, value in sums.items()}


def count(targets_BT: jax.Array, mask_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """How many tokens count, a scalar; NaN when the target of one of them is negative, which no vocabulary has.

    A process that has to refuse its rows of a batch gives a step such targets. The sum over the whole batch then tells
    all processes, with nothing that is sent for it.

    Example:
        >>> count(jnp.array([[3, 0, -1]]), jnp.array([[True, True, False]]), jnp.float32)
        Array(2., dtype=float32)
        >>> count(jnp.array([[3, 0, -1]]), jnp.array([[True, True, True]]), jnp.float32)
        Array(nan, dtype=float32)
    """
    return jnp.where((targets_BT < 0) & (mask_BT > 0), jnp.nan, mask_BT.astype(dtype)).sum()
