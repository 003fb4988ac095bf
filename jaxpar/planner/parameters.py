"""The parameters of a model as shapes: how the axes split each, and how ZeRO does. Imports no JAX.

It restates what `jaxpar.models.Transformer` declares layer by layer and what `jaxpar.zero` chooses from it; a test
compares the two.

Letters: L layers, D width, F feed-forward width, H query heads, G key/value heads, K head width, V vocabulary (padded).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxpar.config import ModelConfig
from jaxpar.planner.cached import cached

TENSOR = ("tensor",)
VOCABULARY = ("pipe", "tensor")
POSITIONS = "positions.weight"
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        name: dotted, as in the model's tree.
        shape: of one layer's array where it is stacked.
        axes: for each dim the mesh axes that split it.
        stacked: it has a leading layer dim, split over `pipe`.
        heads: how many heads the split dim holds; 0: any size divides.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    stacked: bool = False
    heads: int = 0

    @property
    def size(self) -> int:
        """Elements of one layer's array."""
        return math.prod(self.shape)

    def ways(self, pipe: int, tensor: int) -> tuple[int, ...]:
        """In how many blocks each dim is split; key and value heads fewer than `tensor` are copied, not split."""
        sizes = {"pipe": pipe, "tensor": tensor}
        ways = tuple(math.prod(sizes[a] for a in axes) for axes in self.axes)
        return tuple(1 if self.heads and self.heads % n else n for n in ways)

    def zero_dim(self, data: int, pipe: int, tensor: int) -> int | None:
        """The dim that `data` splits, as `jaxpar.zero.split_dim` chooses: the largest free one that divides."""
        ways = self.ways(pipe, tensor)
        free = [d for d, size in enumerate(self.shape) if ways[d] == 1 and size % data == 0]
        return max(free, key=lambda d: self.shape[d]) if data > 1 and free else None


@cached
def parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    """Every parameter of a model.

    Example:
        >>> model = ModelConfig(architecture="llama", vocab_size=10, vocab_multiple=4, hidden_size=4,
        ...     intermediate_size=6, num_hidden_layers=2, num_attention_heads=2)
        >>> [(p.name, p.shape) for p in parameters(model)][:2]
        [('embedding.weight', (12, 4)), ('blocks.attention_norm.scale', (4,))]
    """
    return tuple(_parameters(model))


def _parameters(model: ModelConfig) -> Iterator[Parameter]:
    traits, D, F = model.traits, model.hidden_size, model.intermediate_size
    H, G, K = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    qkv_bias = traits.qkv_bias or traits.all_bias or model.attention_bias
    out_bias, mlp_bias = traits.all_bias or model.attention_bias, traits.all_bias or model.mlp_bias
    yield _table("embedding", model)
    if not traits.rotary:
        yield Parameter(POSITIONS, (model.max_position_embeddings, D), ((), ()))
    yield from _norm("blocks.attention_norm", model, stacked=True)
    for name, heads in (("query", H), ("key", G), ("value", G)):
        yield from _column(f"blocks.attention.{name}", D, heads * K, heads, bias=qkv_bias)
    yield from _row("blocks.attention.out", H * K, D, bias=out_bias)
    for name in ("query_norm", "key_norm") if traits.qk_norm else ():
        yield Parameter(f"blocks.attention.{name}.scale", (K,), ((),), stacked=True)
    yield from _norm("blocks.mlp_norm", model, stacked=True)
    for name in ("gate", "up") if traits.gated else ("up",):
        yield from _column(f"blocks.mlp.{name}", D, F, 0, bias=mlp_bias)
    yield from _row("blocks.mlp.down", F, D, bias=mlp_bias)
    yield from _norm("norm", model, stacked=False)
    if not model.tie_word_embeddings:
        yield _table("lm_head", model)


def _table(name: str, model: ModelConfig) -> Parameter:
    return Parameter(f"{name}.weight", (model.padded_vocab_size, model.hidden_size), (VOCABULARY, ()))


def _norm(name: str, model: ModelConfig, *, stacked: bool) -> Iterator[Parameter]:
    for part in ("scale", "bias") if model.traits.layer_norm else ("scale",):
        yield Parameter(f"{name}.{part}", (model.hidden_size,), ((),), stacked)


def _column(name: str, inputs: int, outputs: int, heads: int, *, bias: bool) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (inputs, outputs), ((), TENSOR), True, heads)
    if bias:
        yield Parameter(f"{name}.bias", (outputs,), (TENSOR,), True, heads)


def _row(name: str, inputs: int, outputs: int, *, bias: bool) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (inputs, outputs), (TENSOR, ()), True)
    if bias:
        yield Parameter(f"{name}.bias", (outputs,), ((),), True)


@dataclass(frozen=True)
class Block:
    """Elements of the parameters that one device holds when `data` splits nothing.

    Attributes:
        layer: of one layer, those that ZeRO splits.
        layer_whole: of one layer, those that it does not.
        rest: outside the layers, those that ZeRO splits.
        rest_whole: outside the layers, those that it does not.
    """

    layer: int
    layer_whole: int
    rest: int
    rest_whole: int


@cached
def block(model: ModelConfig, data: int, pipe: int, tensor: int) -> Block:
    """What one device holds of a layer, and of embedding, head and final norm."""
    sizes = {(stacked, split): 0 for stacked in (True, False) for split in (True, False)}
    for p in parameters(model):
        elements = p.size // math.prod(p.ways(pipe, tensor))
        sizes[p.stacked, p.zero_dim(data, pipe, tensor) is not None] += elements
    return Block(sizes[True, True], sizes[True, False], sizes[False, True], sizes[False, False])


def optimizer_elements(
    model: ModelConfig, data: int, pipe: int, tensor: int, zero: int, rows: int, optimizer: str
) -> int:
    """Elements of the optimizer's state on one device, counters aside: see `jaxpar.optimizer`.

    Args:
        model: sizes and architecture.
        data: replicas, over which ZeRO splits the state like the parameters.
        pipe: stages.
        tensor: devices that share a matrix.
        zero: ZeRO stage.
        rows: layers that a device holds, padding included.
        optimizer: `adamw`, `lion`, `muon`, `sgd` (without momentum), or `adafactor` (an estimate: a row and a column).
    """
    total = 0
    for p in parameters(model):
        ways = p.ways(pipe, tensor)
        elements = p.size // math.prod(ways)
        if zero and p.zero_dim(data, pipe, tensor) is not None:
            elements //= data
        matrix = len(p.shape) == 2
        if optimizer == "adafactor":
            elements = sum(size // n for size, n in zip(p.shape, ways, strict=True))
        copies = {"adamw": 2, "lion": 1, "sgd": 0, "adafactor": 1, "muon": 1 if p.stacked and matrix else 2}[optimizer]
        total += copies * elements * (rows if p.stacked else 1)
    return total
