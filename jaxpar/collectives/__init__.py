"""Communication between the devices of a mesh."""

from jaxpar.collectives.exchange import Exchange
from jaxpar.collectives.halving_doubling import halving_doubling_steps
from jaxpar.collectives.hierarchical import hierarchical_steps
from jaxpar.collectives.reduction import Reduction
from jaxpar.collectives.ring import ring_all_gather, ring_reduce_scatter, ring_steps
from jaxpar.collectives.tree import tree_steps
from jaxpar.collectives.views import (
    all_gather,
    axis_index,
    axis_size,
    block_of,
    manual,
    pmax,
    psum,
    reduce_scatter,
    same_on_all,
    shift,
    varying,
    varying_axes,
)

__all__ = [
    "Exchange",
    "Reduction",
    "all_gather",
    "axis_index",
    "axis_size",
    "block_of",
    "halving_doubling_steps",
    "hierarchical_steps",
    "manual",
    "pmax",
    "psum",
    "reduce_scatter",
    "ring_all_gather",
    "ring_reduce_scatter",
    "ring_steps",
    "same_on_all",
    "shift",
    "tree_steps",
    "varying",
    "varying_axes",
]
