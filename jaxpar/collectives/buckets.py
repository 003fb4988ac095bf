"""Buckets: small arrays travel together, so that each step is paid for once and not once an array."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.collectives.views import varying_axes


def fill(arrays: Sequence[jax.Array], bucket_bytes: int) -> list[list[int]]:
    """Which arrays travel together: their numbers, bucket by bucket.

    Only arrays of the same dtype that vary over the same axes share a bucket: joined with one that varies over more,
    an array would vary over those as well. One that is larger than a bucket has one of its own, and is not cut.

    Args:
        arrays: in the order in which they are put in.
        bucket_bytes: of a bucket, at most.

    Example:
        >>> fill([jnp.ones(3, "float32"), jnp.ones(2, "float32"), jnp.ones(1, "bfloat16"), jnp.ones(9, "float32")], 20)
        [[0, 1], [2], [3]]
    """
    buckets: list[list[int]] = []
    latest: dict[Any, list[int]] = {}
    used: dict[Any, int] = {}
    for number, x in enumerate(arrays):
        kind = (x.dtype, varying_axes(x))
        if kind not in latest or used[kind] + x.nbytes > bucket_bytes:
            latest[kind], used[kind] = [], 0
            buckets.append(latest[kind])
        latest[kind].append(number)
        used[kind] += x.nbytes
    return buckets


def in_buckets(f: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array], bucket_bytes: int) -> list[jax.Array]:
    """Give `f` the arrays joined along their last dim, a bucket at a time, and cut its results in the same places.

    Example:
        >>> in_buckets(lambda x: x.sum(0), [jnp.ones((2, 1)), jnp.ones((2, 3))], bucket_bytes=1000)[1].tolist()
        [2.0, 2.0, 2.0]
    """
    results: dict[int, jax.Array] = {}
    for bucket in fill(arrays, bucket_bytes):
        joined = f(jnp.concatenate([arrays[number] for number in bucket], axis=-1))
        ends = np.cumsum([arrays[number].shape[-1] for number in bucket])[:-1]
        results |= zip(bucket, jnp.split(joined, ends, axis=-1), strict=True)
    return [results[number] for number in range(len(arrays))]
