"""Counting: a model's parameters, its floating-point operations per token, and model FLOPs utilisation.

Plain arithmetic on the config; imports no JAX.

Letters: L layers, D width, F feed-forward width, H query heads, G key/value heads, K head width, V vocabulary,
T tokens of a sequence.
"""

from typing import TYPE_CHECKING

from jaxpar import hardware

if TYPE_CHECKING:
    from jaxpar.config import ModelConfig


def parameter_count(model: "ModelConfig") -> int:
    """Count the parameters, vocabulary padding left out: what Hugging Face reports for the same model.

    Args:
        model: sizes and architecture.

    Returns:
        Weights and biases of embedding, L blocks, final norm, and head unless it is tied to the embedding.

    Example:
        >>> from jaxpar.config import ModelConfig
        >>> parameter_count(ModelConfig(architecture="llama", vocab_size=32000, hidden_size=4096,
        ...     intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32))
        6738415616
    """
    traits = model.traits
    D, F = model.hidden_size, model.intermediate_size
    HK, GK = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    norm = 2 * D if traits.layer_norm else D  # LayerNorm has scale and bias, RMSNorm scale alone
    biases = 0
    if traits.all_bias or traits.qkv_bias or model.attention_bias:
        biases += HK + 2 * GK  # query, key, value
    if traits.all_bias or model.attention_bias:
        biases += D  # attention out
    if traits.all_bias or model.mlp_bias:
        biases += (2 if traits.gated else 1) * F + D  # up (and gate), down
    query_key_norms = 2 * model.head_dim if traits.qk_norm else 0
    block = _block_matrix_params(model) + biases + query_key_norms + 2 * norm
    tables = (1 if model.tie_word_embeddings else 2) * model.vocab_size * D
    positions = 0 if traits.rotary else model.max_position_embeddings * D
    return tables + positions + model.num_hidden_layers * block + norm


def _block_matrix_params(model: "ModelConfig") -> int:
    """Weights of one block's matrices: query and out D·HK each, key and value D·GK each, two or three of D·F."""
    attention = 2 * model.hidden_size * model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    projections = 3 if model.traits.gated else 2
    return attention + projections * model.hidden_size * model.intermediate_size


def flops_per_token(model: "ModelConfig", sequence_length: int) -> int:
    """Count the floating-point operations that training spends on one token, as MFU is defined by PaLM.

    Forward and backward are 3 × forward: the backward pass multiplies each matrix twice. The forward pass is

        2 · N + 4 · L · H · K · min(T, sliding window)

    with N the weights of all matrices a token is multiplied with: the blocks' and the head's (L · block + D · V), not
    the embedding lookup, norms and biases. The second term is scores and weighted values, 2 · T · H · K each. In all
    6 · N + 12 · L · H · K · T, PaLM's formula (arXiv:2204.02311, appendix B: 6N + 12LHQT). Like there, attention
    counts as full although half of it is masked, and recomputation (remat) and vocabulary padding do not count. PaLM
    takes all parameters for N; we leave out those that no matrix multiplication uses.

    Args:
        model: sizes and architecture.
        sequence_length: T, in tokens.

    Returns:
        Operations, a multiplication and an addition counting as two.

    Example:
        >>> from jaxpar.config import ModelConfig
        >>> flops_per_token(ModelConfig(architecture="llama", vocab_size=10, hidden_size=4, intermediate_size=6,
        ...     num_hidden_layers=2, num_attention_heads=2), sequence_length=8)
        2640
    """
    head = 3 * 2 * model.vocab_size * model.hidden_size
    return model.num_hidden_layers * block_flops_per_token(model, sequence_length) + head


def block_flops_per_token(model: "ModelConfig", sequence_length: int) -> int:
    """Count one block's share of `flops_per_token`: all that is not the head's.

    Args:
        model: sizes and architecture.
        sequence_length: T, in tokens.

    Returns:
        3 · (2 · weights of a block's matrices + 4 · H · K · min(T, sliding window)).

    Example:
        >>> from jaxpar.config import ModelConfig
        >>> block_flops_per_token(ModelConfig(architecture="llama", vocab_size=10, hidden_size=4, intermediate_size=6,
        ...     num_hidden_layers=2, num_attention_heads=2), sequence_length=8)
        1200
    """
    seen = sequence_length if model.sliding_window is None else min(sequence_length, model.sliding_window)
    return 3 * (2 * _block_matrix_params(model) + 4 * model.num_attention_heads * model.head_dim * seen)


def peak_flops_per_second(device_kind: str, dtype: str) -> float | None:
    """Look up the dense matrix-multiplication peak of one device.

    Args:
        device_kind: what `jax.devices()[0].device_kind` says, as "NVIDIA H100 80GB HBM3".
        dtype: the compute dtype, "bfloat16", "float16" or "float32". For float32 it is the TF32 peak, half of bf16's
            on all listed chips, since XLA multiplies float32 matrices in TF32 there unless told otherwise.

    Returns:
        Operations per second, or None for CPUs, float64, and devices that are not in `hardware.DEVICES`.

    Example:
        >>> peak_flops_per_second("NVIDIA H200", "bfloat16")
        989000000000000.0
        >>> peak_flops_per_second("cpu", "bfloat16") is None
        True
    """
    device = hardware.find(device_kind)
    if device is None or dtype not in hardware.SHARE_OF_PEAK:
        return None
    return device.flops_per_second * hardware.SHARE_OF_PEAK[dtype]


def mfu(tokens_per_second: float, flops_per_token: int, devices: int, peak: float | None) -> float | None:
    """Compute model FLOPs utilisation: the share of the devices' peak that the model's own arithmetic takes.

    Args:
        tokens_per_second: over all devices.
        flops_per_token: from `flops_per_token`.
        devices: how many took part.
        peak: operations per second of one device, from `peak_flops_per_second`.

    Returns:
        tokens_per_second · flops_per_token / (devices · peak), or None when the peak is not known.

    Example:
        >>> mfu(1e4, 5 * 10**10, devices=1, peak=1e15)
        0.5
    """
    return None if peak is None else tokens_per_second * flops_per_token / (devices * peak)
