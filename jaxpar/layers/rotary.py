"""Rotary position embedding (arXiv:2104.09864), in the half-split form that Hugging Face checkpoints use.

Letters: B batch, T tokens, H heads, K head width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 for contexts longer than it was trained on (Meta, llama-models repository).

    Args:
        factor: low frequencies are divided by this.
        low_freq_factor: wavelengths above original length / this are scaled whole.
        high_freq_factor: wavelengths below original length / this are left alone.
        original_max_position_embeddings: the length the model was first trained on, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def frequencies(head_dim: int, theta: float, scaling: Llama3Scaling | None = None) -> list[float]:
    """Angle per position of each pair of dims, `head_dim / 2` numbers in radians.

    Example:
        >>> frequencies(4, 10000.0)
        [1.0, 0.01]
    """
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    return plain if scaling is None else [_scale(f, scaling) for f in plain]


def _scale(frequency: float, s: Llama3Scaling) -> float:
    """Divide low frequencies by the factor, keep high ones, and blend linearly between."""
    turns = s.original_max_position_embeddings * frequency / (2 * math.pi)
    blend = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blend = min(1.0, max(0.0, blend))
    return (1 - blend) * frequency / s.factor + blend * frequency


def rotate(x_BTHK: jax.Array, frequencies_k: Sequence[float]) -> jax.Array:
    """Turn each pair of dims (i, i + K/2) of position t by `t · frequencies_k[i]`; computed in float32 or wider."""
    dtype = jnp.promote_types(x_BTHK.dtype, jnp.float32)
    angles_Tk = jnp.arange(x_BTHK.shape[1], dtype=dtype)[:, None] * jnp.asarray(frequencies_k, dtype)
    cos_T1k, sin_T1k = jnp.cos(angles_Tk)[:, None], jnp.sin(angles_Tk)[:, None]
    a, b = jnp.split(x_BTHK.astype(dtype), 2, axis=-1)
    turned = jnp.concatenate([a * cos_T1k - b * sin_T1k, b * cos_T1k + a * sin_T1k], axis=-1)
    return turned.astype(x_BTHK.dtype)
