"""What a forward keeps for its backward: bytes on one device, counted from the block's own residuals.

Counted are the arrays that `jax.vjp` keeps of one block (`jaxpar.pipeline.executor` stores just these), by remat
policy; a test compares them with what JAX keeps.

Letters: b sequences of a microbatch on one replica, T tokens, D width, F feed-forward width, H query heads, G
key/value heads, K head width; n devices of `tensor`, over which F, H and (down to one head each) G are split.
"""

from dataclasses import dataclass

from jaxpar.config import ModelConfig
from jaxpar.planner.cached import cached
from jaxpar.planner.parameters import ITEM_BYTES


@dataclass(frozen=True)
class Kept:
    """Bytes that one device keeps for one sequence of a microbatch.

    Attributes:
        layer: of one layer.
        reordered: of `layer`, what XLA copies to another order, for all layers at once, between forward and backward:
            its own attention's weights, where query heads are in several groups.
        boundary: an activation between two blocks.
        logits: of the loss, in float32.
        work: what the backward of one layer holds besides, at its fullest; with remat what it recomputes included.
    """

    layer: int
    reordered: int
    boundary: int
    logits: int
    work: int


@cached
def kept(
    model: ModelConfig,
    sequence_length: int,
    compute_dtype: str,
    pipe: int,
    tensor: int,
    remat: str,
    sequence_parallel: bool,
    attention: str = "flash",
) -> Kept:
    """Count them.

    Args:
        model: sizes and architecture.
        sequence_length: T.
        compute_dtype: of activations; norms and softmax work in float32 at least.
        pipe: shares the vocabulary with `tensor`.
        tensor: n.
        remat: `none`, `dots` or `full`.
        sequence_parallel: between blocks each device has T/n tokens.
        attention: `flash` keeps one number per query and head of the softmax; `xla` keeps the weights of all pairs.
    """
    traits, T, n = model.traits, sequence_length, tensor
    c = ITEM_BYTES[compute_dtype]
    wide = max(c, 4)
    D, f = model.hidden_size, model.intermediate_size // n
    h, g = model.num_attention_heads // n, max(model.num_key_value_heads // n, 1)
    q_width, kv_width = h * model.head_dim, g * model.head_dim
    tokens = T // n if sequence_parallel else T
    boundary = c * tokens * D
    # Each norm: its input in float32, that times two factors of its derivative, two numbers a token, and its result
    # (gathered with sequence parallel).
    norms = 2 * (3 * wide * tokens * D + 2 * wide * tokens + c * T * D)
    hidden = 6 * c * T * f  # gate or up, and four of the activation and the product, and what `down` takes
    heads = c * T * (2 * q_width + 2 * kv_width)  # query, key, value, and what `out` takes
    head_norms = 3 * wide * T * (q_width + kv_width) + 2 * wide * T * (h + g) if traits.qk_norm else 0
    pairs = T * T * h
    # XLA's: the weights of the softmax in float32 and once more for the product, its two numbers a query.
    weights = (wide + c) * pairs if attention == "xla" else 0
    attention_bytes = weights + (2 if attention == "xla" else 1) * wide * T * h
    none = norms + hidden + heads + head_norms + attention_bytes
    projections = 2 if traits.gated else 1
    layer = {
        "none": none,
        "dots": boundary + c * T * (projections * f + q_width + 2 * kv_width + D),
        "full": boundary,
    }[remat]
    # The feed-forward's backward starts from all that was recomputed, but for the head norms, which are then used up.
    # The attention's holds weights, scores and the gradients of both, and half of `hidden`: gradients from which those
    # of the feed-forward's matrices are still to be made.
    recomputed = max(none - head_norms, 2 * weights + hidden // 2)
    return Kept(
        layer=layer,
        reordered=wide * pairs if weights and remat == "none" and 1 < g < h else 0,
        boundary=boundary,
        logits=wide * T * (model.padded_vocab_size // (pipe * n)),
        work=max(weights, hidden) if remat == "none" else recomputed,
    )
