"""Flax (NNX) layers that carry the layout of their parameters and work in global and in block view."""

from flax.nnx import LayerNorm, RMSNorm

from jaxpar.layers.attention import ParallelAttention
from jaxpar.layers.dropout import dropout
from jaxpar.layers.embedding import LearnedPositions, VocabParallelEmbedding
from jaxpar.layers.layout import padding, shardings, specs
from jaxpar.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxpar.layers.mlp import ParallelMLP
from jaxpar.layers.rotary import Llama3Scaling, frequencies, rotate

__all__ = [
    "ColumnParallelLinear",
    "LayerNorm",
    "LearnedPositions",
    "Llama3Scaling",
    "ParallelAttention",
    "ParallelMLP",
    "RMSNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "dropout",
    "frequencies",
    "padding",
    "rotate",
    "shardings",
    "specs",
]
