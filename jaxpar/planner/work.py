"""How long a device computes: matrix multiplications by an efficiency curve, everything else by its bytes.

A multiplication takes its operations at the rate that large ones reach, plus its operands once through memory: small
ones are slower, as on the machine. With a measured curve (`jaxpar bench matmul`) that share of the peak holds instead.

Letters: b sequences, T tokens of a sequence, D width, F feed-forward width, H query heads, G key/value heads, K head
width, V vocabulary; n devices of `tensor`.
"""

from dataclasses import dataclass

import numpy as np

from jaxpar.config import ModelConfig
from jaxpar.hardware import SHARE_OF_PEAK
from jaxpar.planner.cached import cached
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.parameters import ITEM_BYTES, block

ATTENTION_SHARE = 0.6
"""Rate of fused attention over that of large matrix multiplications: FlashAttention-2 reaches 35% of H100's peak
(arXiv:2407.08608, abstract), multiplications in training about 60%."""
ATTENTION_BACKWARD = 2.5
"""Five multiplications in place of two: scores are made again (arXiv:2205.14135)."""
FORWARD_PASSES, BACKWARD_PASSES = 14, 24
"""Times that a layer reads or writes activations of width D outside of multiplications: norms, residual sums, their
gradients in float32."""
HIDDEN_FORWARD, HIDDEN_BACKWARD = 4, 7
"""The same for width F: the activation and the product."""


@dataclass(frozen=True)
class Work:
    """Seconds of one device for one microbatch.

    Attributes:
        forward: forward.
        backward: backward, nothing recomputed.
        weights: of the backward, the multiplications for the weights' gradients alone: what sums over `tensor` can
            hide behind.
        projections: of the forward, its multiplications, which remat `dots` keeps.
    """

    forward: float
    backward: float
    weights: float
    projections: float


def matmul_seconds(m: float, k: float, n: float, dtype: str, cluster: Cluster) -> float:
    """Time of a multiplication [m, k] × [k, n]."""
    flops = 2.0 * m * k * n
    peak = cluster.device.flops_per_second * SHARE_OF_PEAK.get(dtype, 0.05)
    curve = cluster.matmul.get(dtype)
    if curve:
        size, share = zip(*curve, strict=True)
        return flops / (peak * float(np.interp(np.log(min(m, k, n)), np.log(size), share)))
    moved = ITEM_BYTES[dtype] * (m * k + k * n + m * n)
    return flops / (peak * cluster.efficiency.matmul) + memory_seconds(moved, cluster)


def memory_seconds(moved_bytes: float, cluster: Cluster) -> float:
    """Time of reading or writing so many bytes."""
    return moved_bytes / (cluster.device.memory_bytes_per_second * cluster.efficiency.memory)


@cached
def layer_work(
    model: ModelConfig,
    b: int,
    sequence_length: int,
    tensor: int,
    sequence_parallel: bool,
    dtype: str,
    cluster: Cluster,
    attention: str = "flash",
) -> Work:
    """One layer on one microbatch; adding its gradients to the float32 sums is part of the backward."""
    T, D, n, c = sequence_length, model.hidden_size, tensor, ITEM_BYTES[dtype]
    tokens = b * T
    f = model.intermediate_size / n
    q = model.num_attention_heads * model.head_dim / n
    kv = max(model.num_key_value_heads / n, 1) * model.head_dim
    up = 2 if model.traits.gated else 1
    shapes = ((D, q + 2 * kv), (q, D), (D, up * f), (f, D))
    projections = sum(matmul_seconds(tokens, k, w, dtype, cluster) for k, w in shapes)
    inputs = sum(matmul_seconds(tokens, w, k, dtype, cluster) for k, w in shapes)
    weights = sum(matmul_seconds(k, tokens, w, dtype, cluster) for k, w in shapes)
    pairs = (_flash if attention == "flash" else _xla)(model, b, T, n, dtype, cluster)
    width = tokens * D / (n if sequence_parallel else 1)
    fixed = c * tokens * 2 * (q + kv)  # rotary positions
    forward = c * (FORWARD_PASSES * width + HIDDEN_FORWARD * tokens * f) + fixed
    backward = c * (BACKWARD_PASSES * width + HIDDEN_BACKWARD * tokens * f) + fixed
    held = block(model, 1, 1, n)
    backward += (held.layer + held.layer_whole) * (c + 8)  # read the gradient, read and write the sum
    return Work(
        forward=projections + pairs[0] + memory_seconds(forward, cluster),
        backward=inputs + weights + pairs[1] + memory_seconds(backward, cluster),
        weights=weights,
        projections=projections,
    )


def _multiplying_rate(dtype: str, cluster: Cluster) -> float:
    share = cluster.efficiency.matmul if dtype not in cluster.matmul else cluster.matmul[dtype][-1][1]
    return cluster.device.flops_per_second * SHARE_OF_PEAK.get(dtype, 0.05) * share


def _flash(model: ModelConfig, b: int, T: int, n: int, dtype: str, cluster: Cluster) -> tuple[float, float]:
    """Scores and what is made of them, forward and backward, in one kernel that writes no scores."""
    seen = T if model.sliding_window is None else min(T, model.sliding_window)
    flops = 4.0 * b * T * seen * model.num_attention_heads * model.head_dim / n / 2  # half is masked, and left out
    forward = flops / (_multiplying_rate(dtype, cluster) * ATTENTION_SHARE)
    return forward, ATTENTION_BACKWARD * forward


def _xla(model: ModelConfig, b: int, T: int, n: int, dtype: str, cluster: Cluster) -> tuple[float, float]:
    """The same by plain multiplications of all pairs, masked ones too, whose scores go through memory.

    Forward: the first product writes the scores in float32 at least; the softmax reads them, and writes its weights as
    they are kept and once more in the compute dtype, which the second product reads. Backward: the products read those,
    and write the weights' gradients; the softmax reads these and its weights, and writes the scores' gradients in the
    compute dtype, which two products read.
    """
    c = ITEM_BYTES[dtype]
    wide, heads = max(c, 4), model.num_attention_heads / n
    pairs = b * heads * T * T
    multiplying = 4.0 * pairs * model.head_dim / _multiplying_rate(dtype, cluster)
    forward = multiplying + memory_seconds(pairs * (3 * wide + 2 * c), cluster)
    return forward, 2 * multiplying + memory_seconds(pairs * (3 * wide + 4 * c), cluster)


LOGIT_PASSES = 8
"""Times that the loss and its gradient read or write logits in float32."""


@cached
def head_seconds(
    model: ModelConfig, b: int, sequence_length: int, ways: int, dtype: str, cluster: Cluster
) -> tuple[float, float]:
    """Final norm, logits, loss and their gradients for one microbatch, with V split `ways` ways: forward, backward."""
    tokens, D, v = b * sequence_length, model.hidden_size, model.padded_vocab_size / ways
    forward = matmul_seconds(tokens, D, v, dtype, cluster)
    backward = matmul_seconds(tokens, v, D, dtype, cluster) + matmul_seconds(D, tokens, v, dtype, cluster)
    logits = memory_seconds(4.0 * tokens * v * LOGIT_PASSES / 2, cluster)
    return forward + logits, backward + logits + memory_seconds(12.0 * v * D, cluster)
