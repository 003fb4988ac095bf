"""Closed forms from papers, in their own conventions: what the planner's exact counts are held against.

They count bf16 weights and gradients and 12 bytes of Adam's state for each parameter; jaxpar keeps float32 weights,
which are the master copy (`jaxpar.planner.memory`).

Letters as in the papers: s tokens of a sequence, b sequences of a microbatch, h width, a heads, L layers, V vocabulary,
t devices of `tensor`, Ψ parameters, d replicas.
"""

from jaxpar.config import InputError


def zero_bytes(parameters: float, replicas: int, stage: int) -> float:
    """Bytes of weights, gradients and Adam's state on one device under ZeRO (arXiv:1910.02054, table 1).

    Stage 0 is 16Ψ; stage 1 Ψ(4 + 12/d), stage 2 Ψ(2 + 14/d), stage 3 16Ψ/d.

    Example:
        >>> zero_bytes(7.5e9, 64, stage=1) / 1e9
        31.40625
    """
    weights, gradients, state = 2.0, 2.0, 12.0
    return parameters * (
        weights / (replicas if stage >= 3 else 1)
        + gradients / (replicas if stage >= 2 else 1)
        + state / (replicas if stage >= 1 else 1)
    )


def gpt_parameters(layers: int, width: int, vocabulary: int, sequence_length: int) -> float:
    """Parameters of a GPT: 12Lh² (1 + 13/(12h) + (V + s)/(12Lh)) (arXiv:2104.04473, equation 2).

    Example:
        >>> round(gpt_parameters(96, 12288, 51200, 2048) / 1e9, 1)
        174.6
    """
    L, h = layers, width
    return 12 * L * h**2 * (1 + 13 / (12 * h) + (vocabulary + sequence_length) / (12 * L * h))


def gpt_flops(batch: int, sequence_length: int, layers: int, width: int, vocabulary: int, *, recompute: bool) -> float:
    """Operations of a step: 96BsLh² (1 + s/(6h) + V/(16Lh)) with full recomputation (arXiv:2104.04473, equation 3).

    Without it the layers are passed three times in place of four, the head three times in both: 72 in place of 96 and
    V/(12Lh) for the head.

    Example:
        >>> gpt_flops(1, 2048, 96, 12288, 51200, recompute=True) / gpt_flops(1, 2048, 96, 12288, 51200, recompute=False)
        1.332...
    """
    B, s, L, h = batch, sequence_length, layers, width
    layer_passes = 4 if recompute else 3
    return 24 * layer_passes * B * s * L * h**2 * (1 + s / (6 * h)) + 6 * B * s * h * vocabulary


RECOMPUTE = ("none", "selective", "full")


def activation_bytes(
    sequence_length: int,
    sequences: int,
    width: int,
    heads: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes that one layer of a GPT keeps, GELU and dropout included (arXiv:2205.05198, table 2).

    | | bytes |
    |---|---|
    | one device | sbh (34 + 5as/h) |
    | tensor parallel | sbh (10 + 24/t + 5as/(ht)) |
    | with sequence parallel | sbh (34/t + 5as/(ht)) |
    | selective recomputation | the same without 5as/(ht) |
    | full recomputation | 2sbh |

    Args:
        sequence_length: s.
        sequences: b.
        width: h.
        heads: a.
        tensor: t.
        sequence_parallel: what is not split by t otherwise is split along s.
        recompute: `none`, `selective` (attention's pairs) or `full`.

    Example:
        >>> activation_bytes(2048, 1, 12288, 96, tensor=8, sequence_parallel=True, recompute="selective") == (
        ...     34 * 2048 * 12288 / 8)
        True
    """
    if recompute not in RECOMPUTE:
        raise InputError(f"recompute = {recompute}: must be one of {', '.join(RECOMPUTE)}.")
    s, b, h, a, t = sequence_length, sequences, width, heads, tensor
    if recompute == "full":
        return 2.0 * s * b * h
    whole = 10 / t if sequence_parallel else 10
    pairs = 0.0 if recompute == "selective" else 5 * a * s / (h * t)
    return s * b * h * (whole + 24 / t + pairs)
