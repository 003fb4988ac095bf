"""Attention in block view against global view, and global view against a plain numpy attention.

Letters: B batch, T tokens, S keys, D width, H query heads, G key/value heads, K head width.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.config import InputError, choose_implementation
from jaxpar.layers import ParallelAttention, frequencies
from jaxpar.layers.attention import causal_attention
from jaxpar.mesh import make_mesh
from tests.layers.both_views import MESHES, B, D, T, assert_same, compare_views, numbers, random_params

H, K = 8, 6
ROTARY = frequencies(K, 100.0)
KINDS: dict[str, dict[str, Any]] = {
    "all heads, biases": {"qkv_bias": True, "out_bias": True},
    "4 kv heads, rotary, window": {"num_kv_heads": 4, "rope_frequencies": ROTARY, "sliding_window": 3},
    "2 kv heads, rotary, q/k norm": {"num_kv_heads": 2, "rope_frequencies": ROTARY, "qk_norm": 1e-6},
    "1 kv head, biases, rotary": {"num_kv_heads": 1, "qkv_bias": True, "rope_frequencies": ROTARY},
}
"""Under tensor 4 the last two have fewer key and value heads than devices, the last one under tensor 2 as well."""


def make(sequence_parallel: bool, **options: Any) -> ParallelAttention:
    return ParallelAttention(
        D, H, head_dim=K, sequence_parallel=sequence_parallel, param_dtype=np.float64, rngs=nnx.Rngs(0), **options
    )


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence_parallel"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_views(sizes: tuple[int, ...], sequence_parallel: bool, kind: str):
    tokens = P("data", "tensor" if sequence_parallel else None)
    compare_views(
        lambda split: make(split, **KINDS[kind]),
        numbers(B, T, D),
        make_mesh(*sizes),
        sequence_parallel=sequence_parallel,
        x_spec=tokens,
        y_spec=tokens,
    )


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def plain_attention(
    params: dict[str, Any],
    x: np.ndarray,
    num_kv_heads: int = H,
    rope_frequencies: list[float] | None = None,
    qk_norm: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> np.ndarray:
    """One head and one query token after the other, in numpy."""

    def heads(name: str) -> np.ndarray:
        y = x @ params[name]["weight"] + params[name].get("bias", 0)
        y = y.reshape(B, T, -1, K)
        norm = f"{name}_norm"
        if norm in params:
            y = y / np.sqrt((y**2).mean(-1, keepdims=True) + qk_norm) * params[norm]["scale"]
        if rope_frequencies and name != "value":
            z = y[..., : K // 2] + 1j * y[..., K // 2 :]
            z = z * np.exp(1j * np.arange(T)[:, None, None] * np.array(rope_frequencies))
            y = np.concatenate([z.real, z.imag], -1)
        return y

    query, key, value = heads("query"), heads("key"), heads("value")
    out = np.zeros((B, T, H, K))
    for h in range(H):
        g = h // (H // num_kv_heads)  # as `repeat_kv` in Hugging Face's models
        for t in range(T):
            seen = slice(0 if sliding_window is None else max(0, t - sliding_window + 1), t + 1)
            weights = softmax(np.einsum("bk,bsk->bs", query[:, t, h], key[:, seen, g]) / np.sqrt(K))
            out[:, t, h] = np.einsum("bs,bsk->bk", weights, value[:, seen, g])
    return out.reshape(B, T, H * K) @ params["out"]["weight"] + params["out"].get("bias", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_formula(kind: str):
    layer = make(False, **KINDS[kind])
    params = random_params(layer)
    x = numbers(B, T, D)
    assert_same(nnx.merge(nnx.graphdef(layer), params)(x), plain_attention(params, x, **KINDS[kind]))


def queries_keys_values(dtype: Any = np.float64, kv_heads: int = 2) -> tuple[jax.Array, ...]:
    shapes = (B, T, H, K), (B, T, kv_heads, K), (B, T, kv_heads, K)
    return tuple(jnp.asarray(numbers(*shape, seed=seed), dtype) for seed, shape in enumerate(shapes))


@pytest.mark.parametrize("window", [None, 1, 3, T, 100])
def test_float32_runs_another_kernel_and_agrees(window: int | None):
    """`jax.nn.dot_product_attention` in float32 against our float64 softmax, value and gradient."""
    w = numbers(B, T, H, K, seed=9)

    def run(dtype: Any) -> tuple[jax.Array, ...]:
        attend = lambda *qkv: causal_attention(*qkv, window=window, kernel="xla")
        y, backward = jax.vjp(attend, *queries_keys_values(dtype))
        return y, *backward(jnp.asarray(w, dtype))

    for got, want in zip(run(np.float32), run(np.float64), strict=True):
        assert got.dtype == np.float32
        # float32 has 24 bits: 6e-8 of numbers up to 10 (key gradients add those of 4 heads and 8 tokens).
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * max(1, np.abs(want).max()))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("window", [None, 3])
def test_the_future_is_not_seen(dtype: Any, window: int | None):
    """A change at token t reaches token t and later ones (as far as the window), and no earlier one: to the bit."""
    attend = jax.jit(lambda *qkv: causal_attention(*qkv, window=window, kernel="xla"))
    q, k, v = queries_keys_values(dtype)
    before = attend(q, k, v)
    for t in range(T):
        after = attend(q.at[:, t].add(1), k.at[:, t].add(1), v.at[:, t].add(1))
        changed = np.asarray(before != after).any((0, 2, 3))
        np.testing.assert_array_equal(changed, [t <= s < t + (window or T) for s in range(T)])


@pytest.mark.parametrize(
    ("wanted", "dtype", "platform", "kernel", "reason"),
    [
        ("auto", "bfloat16", "gpu", "cudnn", "flash attention on a GPU in bfloat16"),
        ("cudnn", "bfloat16", "cuda", "cudnn", "as configured"),
        ("auto", "float32", "gpu", "xla", "needs bfloat16, and train.compute_dtype is float32"),
        ("auto", "bfloat16", "cpu", "xla", "needs a GPU, and the devices are cpu"),
        ("xla", "bfloat16", "gpu", "xla", "as configured"),
    ],
)
def test_the_kernel_is_chosen_with_a_reason(wanted: str, dtype: str, platform: str, kernel: str, reason: str):
    chosen, why = choose_implementation(wanted, dtype, platform)
    assert chosen == kernel and reason in why


@pytest.mark.parametrize(
    ("dtype", "platform", "reason"),
    [
        ("bfloat16", "cpu", "the devices are cpu"),
        ("float32", "gpu", "train.compute_dtype is float32"),
    ],
)
def test_cudnn_is_not_replaced_in_silence(dtype: str, platform: str, reason: str):
    with pytest.raises(InputError, match=rf"model.attn_implementation cudnn: .*{reason}\. Use auto or xla\."):
        choose_implementation("cudnn", dtype, platform)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="num_heads 8 mod num_kv_heads 3 = 2, not 0"):
        make(False, num_kv_heads=3)
    with pytest.raises(ValueError, match="features 10 mod num_heads 4 = 2, not 0"):
        ParallelAttention(10, 4, rngs=nnx.Rngs(0))
