"""Cross-entropy over a vocabulary that is split between devices.

Letters: B batch, T tokens, V vocabulary; a lower-case letter is this device's block.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives import axis_index, pmax, psum, varying_axes
from jaxpar.mesh import VOCAB_AXES


def cross_entropy(
    logits_BTv: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array, *, z_loss: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Sum of the negative log likelihoods of unmasked tokens, and how many there are.

    The loss of a run is the sum over the whole global batch divided by the count over the whole global batch.
    Logits are never gathered: devices exchange the maximum, the sum of exponentials and the target's logit, three
    numbers per token (the scheme of Megatron-LM, arXiv:1909.08053 section 3). Computed in float32 or wider.

    Args:
        logits_BTv: `[B, T, V/(pipe·tensor)]`. In block view the axes of (pipe, tensor) over which the value varies
            are those that V is split over; a head that is whole on every device works as well.
        targets_BT: `i32[B, T]`, the next tokens.
        mask_BT: `[B, T]`, true or 1 where a token counts.
        z_loss: weight of log(Z)² per token, which keeps the normaliser Z near 1 (arXiv:2204.02311, section 5).

    Returns:
        Two scalars, summed over this device's B and T: the loss, and the number of tokens, both in float32 or wider.

    Example:
        >>> loss, tokens = cross_entropy(jnp.zeros((1, 2, 4)), jnp.array([[3, 0]]), jnp.array([[True, False]]))
        >>> round(float(loss), 4), float(tokens)  # log 4
        (1.3863, 1.0)
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
    loss_BT = log_z_BT - target_logit_BT + z_loss * log_z_BT**2
    counts_BT = mask_BT.astype(loss_BT.dtype)
    return jnp.where(counts_BT > 0, loss_BT * counts_BT, 0).sum(), counts_BT.sum()
