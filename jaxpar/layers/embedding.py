"""Token embedding and output head, split over the vocabulary; learned positions.

The vocabulary is split over `pipe` and `tensor` together. A vocabulary that does not divide is padded up to a
fixed multiple, the same on every layout, so that a checkpoint fits any mesh (Megatron-LM does the same with
--make-vocab-size-divisible-by). Padded rows start at zero, are never looked up, and never get probability.

Letters: B batch, T tokens, D width, V vocabulary (padded); a lower-case letter is this device's block.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import all_gather, axis_index, block_of, psum, reduce_scatter
from jaxpar.layers.layout import Initializer
from jaxpar.layers.linear import NORMAL
from jaxpar.layers.token_sums import add, look_up
from jaxpar.mesh import PIPE, TENSOR, VOCAB_AXES


class VocabParallelEmbedding(nnx.Module):
    """A table `[V/(pipe·tensor), D]`: tokens to vectors, and as output head vectors to logits.

    Tied embeddings use one table for both; an untied head is a second one of which only `logits` is called.

    Args:
        vocab_size: number of real entries.
        features: D.
        multiple: the table has `vocab_size` rounded up to a multiple of this.
        sequence_parallel: vectors are split over `tensor` along T between blocks.
        embedding_init: initializer of the real rows.
        param_dtype: dtype of the table.
        rngs: source of the initial weights.

    Example:
        >>> table = VocabParallelEmbedding(503, 8, rngs=nnx.Rngs(0))
        >>> table.weight.shape, table(jnp.array([[1, 502]])).shape
        ((512, 8), (1, 2, 8))
        >>> table.logits(jnp.ones((1, 2, 8)))[0, 0, 503:505]  # the first padded entries
        Array([-inf, -inf], dtype=float64)
    """

    def __init__(
        self,
        vocab_size: int,
        features: int,
        *,
        multiple: int = 128,
        sequence_parallel: bool = False,
        embedding_init: Initializer = NORMAL,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        padding = -vocab_size % multiple
        table_VD = jnp.pad(embedding_init(rngs.params(), (vocab_size, features), param_dtype), ((0, padding), (0, 0)))
        self.weight = nnx.Param(table_VD, layout=P(VOCAB_AXES, None), padding=padding)
        self.vocab_size = vocab_size
        self.padding = padding
        self.sequence_parallel = sequence_parallel

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Vectors `[B, T, D]` of tokens `i32[B, T]`, in block view summed over the vocabulary's axes (all-reduce).

        With `sequence_parallel` the result is `[B, T/tensor, D]` (reduce-scatter over `tensor`).
        """
        table_vD = self.weight[...]
        size = table_vD.shape[0]
        local_BT = tokens_BT - axis_index(VOCAB_AXES) * size
        inside_BT = (local_BT >= 0) & (local_BT < size)
        x_BTD_part = jnp.where(inside_BT[..., None], look_up(table_vD, jnp.clip(local_BT, 0, size - 1)), 0)
        if self.sequence_parallel:
            return reduce_scatter(psum(x_BTD_part, PIPE), TENSOR, dim=1)
        return psum(x_BTD_part, VOCAB_AXES)

    def logits(self, x: jax.Array) -> jax.Array:
        """Logits `f32[B, T, V/(pipe·tensor)]` of vectors `[B, T, D]` (or this device's block of T, gathered first)."""
        x_BTD = all_gather(x, TENSOR, dim=1) if self.sequence_parallel else x
        table_vD = self.weight[...]
        accumulate = jnp.promote_types(x.dtype, jnp.float32)
        logits_BTv = jnp.einsum("btd,vd->btv", x_BTD, table_vD, preferred_element_type=accumulate)
        if not self.padding:
            return logits_BTv
        size = table_vD.shape[0]
        real_v = jnp.arange(size) + axis_index(VOCAB_AXES) * size < self.vocab_size
        return jnp.where(real_v, logits_BTv, -jnp.inf)


class LearnedPositions(nnx.Module):
    """A replicated table `[length, D]` added to the first T positions (GPT-2).

    Args:
        length: the longest sequence.
        features: D.
        sequence_parallel: inputs are split over `tensor` along T; each device adds its own positions.
        embedding_init: initializer.
        param_dtype: dtype of the table.
        rngs: source of the initial weights.
    """

    def __init__(
        self,
        length: int,
        features: int,
        *,
        sequence_parallel: bool = False,
        embedding_init: Initializer = NORMAL,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.weight = nnx.Param(embedding_init(rngs.params(), (length, features), param_dtype))
        self.sequence_parallel = sequence_parallel

    def __call__(self, x: jax.Array, tokens: int) -> jax.Array:
        """Add positions 0 … tokens-1 to `[B, T, D]`, or this device's share of them to its block of T."""
        p_TD = self.weight[...][:tokens]
        return add(x, block_of(p_TD, TENSOR, dim=0) if self.sequence_parallel else p_TD)
