"""Communication between the devices of a mesh."""

from jaxpar.collectives.views import (
    all_gather,
    axis_index,
    axis_size,
    block_of,
    manual,
    pmax,
    psum,
    reduce_scatter,
    shift,
    varying,
    varying_axes,
)

__all__ = [
    "all_gather",
    "axis_index",
    "axis_size",
    "block_of",
    "manual",
    "pmax",
    "psum",
    "reduce_scatter",
    "shift",
    "varying",
    "varying_axes",
]
