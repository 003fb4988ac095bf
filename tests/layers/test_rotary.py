"""Rotary positions against multiplication by a complex number, and Llama 3's scaling against values by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.layers import Llama3Scaling, frequencies, rotate
from tests.layers.both_views import assert_same, numbers

B, T, H, K = 2, 7, 3, 6
SCALING = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)  # of Llama 3.1


def turned(x: np.ndarray, angle: list[float]) -> np.ndarray:
    """Dims i and i + K/2 are the real and imaginary part of a number that is multiplied by exp(i · t · angle)."""
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:]
    z = z * np.exp(1j * np.arange(x.shape[1])[:, None, None] * np.array(angle))
    return np.concatenate([z.real, z.imag], axis=-1)


def test_rotation_is_a_complex_product():
    angle = frequencies(K, 100.0)
    np.testing.assert_allclose(angle, 100.0 ** (-np.arange(3) / 3), rtol=1e-15)  # one rounding of the power
    x, w = numbers(B, T, H, K), numbers(B, T, H, K, seed=1)
    y, backward = jax.vjp(lambda x: rotate(x, angle), x)
    assert_same(y, turned(x, angle))
    assert_same(backward(w)[0], turned(w, [-a for a in angle]))  # a rotation's transpose turns back


def test_scores_depend_on_the_distance_alone():
    angle = frequencies(K, 100.0)
    q, k = (np.broadcast_to(numbers(K, seed=seed), (1, T, 1, K)) for seed in (0, 1))
    scores_TS = np.einsum("btk,bsk->ts", rotate(q, angle)[:, :, 0], rotate(k, angle)[:, :, 0])
    for distance in range(1 - T, T):
        diagonal = np.diagonal(scores_TS, distance)
        assert_same(diagonal, np.full_like(diagonal, diagonal[0]))


def test_bfloat16_is_turned_in_float32():
    """Angles of late positions are far beyond what bfloat16 can hold: 1001 becomes 1000."""
    x = jnp.asarray(numbers(1, 1002, 1, K), jnp.bfloat16)
    y = rotate(x, frequencies(K, 100.0))
    assert y.dtype == jnp.bfloat16
    want = turned(np.asarray(x, np.float64), frequencies(K, 100.0))
    # Rounding the result to bfloat16's 8 bits costs 2^-9 of at most 5; angles in float32 1001 · 2^-24.
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize(
    ("wavelength", "factor"),
    [
        (2047, 1.0),  # below 8192 / 4: kept
        (2048, 1.0),
        (3072, 5 / 9 + 4 / 9 / 8),  # 8192/3072 = 8/3 turns, (8/3 - 1)/3 = 5/9 kept
        (4096, 1 / 3 + 2 / 3 / 8),  # 2 turns, (2 - 1)/3 = 1/3 kept, 2/3 divided by 8
        (8192, 1 / 8),
        (20000, 1 / 8),  # above 8192 / 1: divided by 8
    ],
)
def test_llama3_scaling_by_hand(wavelength: int, factor: float):
    """The formula of Hugging Face's `rope_type: llama3`.

    With 4 dims the second pair turns by theta^(-1/2) per token, and theta is chosen to give it this wavelength.
    """
    angle = 2 * math.pi / wavelength
    first, second = frequencies(4, angle**-2, SCALING)
    assert first == 1.0  # a wavelength of 2π tokens
    assert second == pytest.approx(angle * factor, rel=1e-12)  # a square, a root and a handful of roundings


def test_llama3_scaling_of_a_whole_head():
    """Llama 3.1's own head: 128 dims, theta 500000; the documented rule, written with wavelengths."""
    plain = np.array(frequencies(128, 500000.0))
    wavelength = 2 * np.pi / plain
    smooth = (8192 / wavelength - 1) / (4 - 1)
    want = np.where(wavelength > 8192, plain / 8, (1 - smooth) * plain / 8 + smooth * plain)
    want = np.where(wavelength < 2048, plain, want)
    got = np.array(frequencies(128, 500000.0, SCALING))
    np.testing.assert_allclose(got, want, rtol=1e-12)
    # All three kinds are there.
    assert (got == plain).any() and (got == plain / 8).any() and ((got < plain) & (got > plain / 8)).sum() > 3
