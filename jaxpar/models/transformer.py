"""The decoder transformer: Llama, Mistral, Qwen2, Qwen3 and GPT-2 by configuration.

Letters: B batch, T tokens, D width, V vocabulary; a lower-case letter is this device's block.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpar.config import ModelConfig
from jaxpar.layers import (
    LayerNorm,
    LearnedPositions,
    Llama3Scaling,
    ParallelAttention,
    ParallelMLP,
    RMSNorm,
    VocabParallelEmbedding,
    dropout,
    frequencies,
)
from jaxpar.layers.dropout import fold_in
from jaxpar.models.protocol import stack


def _norm(config: ModelConfig, param_dtype: Any, rngs: nnx.Rngs) -> nnx.Module:
    if config.traits.layer_norm:
        epsilon = config.layer_norm_epsilon
        return LayerNorm(
            config.hidden_size, epsilon=epsilon, use_fast_variance=False, param_dtype=param_dtype, rngs=rngs
        )
    return RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, param_dtype=param_dtype, rngs=rngs)


class Block(nnx.Module):
    """Pre-norm attention and feed-forward, each added to its input after dropout.

    In and out `[B, T, D]`, or `[B, T/tensor, D]` with `sequence_parallel`. Two all-reduces over `tensor` forward
    and two backward; or two pairs of all-gather and reduce-scatter each way.
    """

    def __init__(
        self, config: ModelConfig, *, sequence_parallel: bool, implementation: Any, param_dtype: Any, rngs: nnx.Rngs
    ) -> None:
        traits = config.traits
        normal = nnx.initializers.normal
        # Residual branches start smaller by 1/sqrt(number of branches), as in GPT-2 (section 2.3 of its report).
        shared: dict[str, Any] = {
            "sequence_parallel": sequence_parallel,
            "kernel_init": normal(config.initializer_range),
            "out_init": normal(config.initializer_range / math.sqrt(2 * config.num_hidden_layers)),
            "param_dtype": param_dtype,
            "rngs": rngs,
        }
        norm = partial(_norm, config, param_dtype, rngs)
        scaling = config.rope_scaling and Llama3Scaling(**config.rope_scaling.model_dump(exclude={"rope_type"}))
        self.attention_norm = norm()
        self.attention = ParallelAttention(
            config.hidden_size,
            config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rope_frequencies=frequencies(config.head_dim, config.rope_theta, scaling) if traits.rotary else None,
            qkv_bias=traits.qkv_bias or traits.all_bias or config.attention_bias,
            out_bias=traits.all_bias or config.attention_bias,
            qk_norm=config.rms_norm_eps if traits.qk_norm else None,
            sliding_window=config.sliding_window,
            implementation=implementation,
            **shared,
        )
        self.mlp_norm = norm()
        self.mlp = ParallelMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            gated=traits.gated,
            bias=traits.all_bias or config.mlp_bias,
            **shared,
        )
        self.dropout = partial(dropout, rate=config.resid_pdrop, sequence_parallel=sequence_parallel)

    def __call__(self, x: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
        """Apply the block; `keys_B` is one dropout key per example, or None."""
        y = checkpoint_name(self.attention(self.attention_norm(x)), "attention_out")
        x = x + self.dropout(y, fold_in(keys_B, 0))
        y = checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp_out")
        return x + self.dropout(y, fold_in(keys_B, 1))


class Transformer(nnx.Module):
    """A decoder-only language model (a `LanguageModel`).

    Args:
        config: the sizes and the architecture's name.
        sequence_parallel: keep activations between blocks split over `tensor` along T.
        implementation: of attention, see `ParallelAttention`.
        param_dtype: dtype of the parameters.
        rngs: source of the initial weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        sequence_parallel: bool = False,
        implementation: Any = "xla",
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        table = partial(
            VocabParallelEmbedding,
            config.vocab_size,
            config.hidden_size,
            multiple=config.vocab_multiple,
            sequence_parallel=sequence_parallel,
            embedding_init=nnx.initializers.normal(config.initializer_range),
            param_dtype=param_dtype,
        )
        self.embedding = table(rngs=rngs)
        positions = partial(
            LearnedPositions,
            config.max_position_embeddings,
            config.hidden_size,
            sequence_parallel=sequence_parallel,
            embedding_init=nnx.initializers.normal(config.initializer_range),
            param_dtype=param_dtype,
        )
        self.positions = None if config.traits.rotary else positions(rngs=rngs)
        block = partial(
            Block,
            config,
            sequence_parallel=sequence_parallel,
            implementation=implementation,
            param_dtype=param_dtype,
        )
        self.blocks = stack(lambda rngs: block(rngs=rngs), config.num_hidden_layers, rngs)
        self.norm = _norm(config, param_dtype, rngs)
        self.lm_head = None if config.tie_word_embeddings else table(rngs=rngs)

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """Tokens to activations."""
        x = self.embedding(tokens_BT)
        return x if self.positions is None else self.positions(x, tokens_BT.shape[1])

    def block(self, layer: Block, x: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        """Apply one block."""
        return layer(x, keys_B)

    def head(self, x: jax.Array) -> jax.Array:
        """Final norm and logits `f32[B, T, V/(pipe·tensor)]`."""
        return (self.lm_head or self.embedding).logits(self.norm(x))
