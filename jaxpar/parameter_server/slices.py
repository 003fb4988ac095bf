"""Which rows of which parameter each server owns, and how states are cut and put together again.

Everything here goes by name: a state is a dict from a parameter's path ("blocks/mlp/up/weight") to its array, as in
checkpoints, stacks in model order. A server owns neighbouring rows (of the leading dim) of neighbouring parameters. For
a stacked parameter a row is a layer, for an embedding a token. Optimizers that look at whole matrices outside the stack
keep theirs whole.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from jaxpar.config import InputError
from jaxpar.names import Named


@dataclass(frozen=True)
class Slice:
    """The rows `start .. stop - 1` of a parameter's leading dim.

    Attributes:
        name: path of the parameter.
        start: first row.
        stop: row after the last.
        padding: how many of these rows, the last ones, only fill the parameter up.
    """

    name: str
    start: int
    stop: int
    padding: int = 0


Slices = tuple[Slice, ...]


def cut(params: Mapping[str, Any], servers: int, *, by_rows: bool) -> tuple[Slices, ...]:
    """Cut parameters into as many pieces as there are servers, of about equally many bytes.

    All rows stand in one line, which is cut at the legal place next to each multiple of the mean.

    Args:
        params: arrays or shapes by name.
        servers: how many pieces.
        by_rows: matrices may be cut between any two rows; otherwise only whole parameters are dealt out.

    Returns:
        For each server its slices, at least one.

    Raises:
        InputError: more servers than parameters.

    Example:
        >>> shapes = {"embed": np.zeros((6, 4)), "head": np.zeros((2, 4)), "norm": np.zeros(4)}
        >>> for slices in cut(shapes, 2, by_rows=True):
        ...     print([(s.name, s.start, s.stop) for s in slices])
        [('embed', 0, 4)]
        [('embed', 4, 6), ('head', 0, 2), ('norm', 0, 4)]
    """
    if servers > len(params):
        raise InputError(
            f"parameter_server.servers {servers} ≤ {len(params)}, the number of the model's parameter arrays, does not "
            f"hold: each server owns some. Use servers {len(params)} or less."
        )
    firsts, places = [], []  # the byte at which each parameter begins, and all at which a cut may be
    total = 0
    for leaf in params.values():
        size, rows = nbytes(leaf), leaf.shape[0] if by_rows and len(leaf.shape) > 1 else 1
        firsts.append(total)
        places.append(total + size // rows * np.arange(rows))
        total += size
    legal = np.append(np.concatenate(places), total)
    cuts = [0]
    for server in range(1, servers):
        nearest = int(np.abs(legal - total * server / servers).argmin())
        cuts.append(min(max(nearest, cuts[-1] + 1), len(legal) - 1 - (servers - server)))
    bounds = [int(legal[c]) for c in cuts] + [total]
    return tuple(tuple(_between(params, firsts, begin, end)) for begin, end in pairwise(bounds))


def _between(params: Mapping[str, Any], firsts: Sequence[int], begin: int, end: int) -> list[Slice]:
    """The rows whose bytes lie in `begin .. end - 1` of the line."""
    slices = []
    for (name, leaf), first in zip(params.items(), firsts, strict=True):
        row_bytes = nbytes(leaf) // leaf.shape[0]
        start, stop = ((min(max(x - first, 0), nbytes(leaf)) // row_bytes) for x in (begin, end))
        slices += [Slice(name, start, stop)] if start < stop else []
    return slices


def nbytes(leaf: Any) -> int:
    """Bytes of an array or shape."""
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def take(params: Mapping[str, Any], slices: Slices) -> Named:
    """The rows of some slices, by name."""
    return {s.name: params[s.name][s.start : s.stop] for s in slices}


def take_state(state: Mapping[str, Any], params: Mapping[str, Any], slices: Slices) -> Named:
    """What a server needs of the optimizer's state: what belongs to its rows, and what belongs to no parameter.

    Args:
        state: leaves of the optimizer's state by name ("1/mu/blocks/mlp/up/weight").
        params: all parameters, arrays or shapes, by name.
        slices: the server's.
    """
    owned = {s.name: s for s in slices}
    taken: Named = {}
    for name, leaf in state.items():
        param = parameter_of(name, params)
        if param is None:
            taken[name] = leaf
        elif param in owned:
            s = owned[param]
            taken[name] = leaf[s.start : s.stop] if by_row(leaf, params[param]) else leaf
    return taken


def assemble(shapes: Mapping[str, Any], params: Mapping[str, Any], parts: Sequence[tuple[Slices, Named]]) -> Named:
    """The whole state from the servers' parts; the inverse of `take` and of `take_state`.

    Args:
        shapes: arrays or shapes of the whole, by name; parameters themselves or leaves of the optimizer's state.
        params: all parameters, arrays or shapes, by name.
        parts: each server's slices and what it holds. What belongs to no parameter is the same on all that have it.
    """
    whole: Named = {}
    for name, shape in shapes.items():
        param = parameter_of(name, params)
        pieces = [(s, held[name]) for slices, held in parts for s in slices if s.name == param]
        if param is None:
            whole[name] = next(np.asarray(held[name]) for _, held in parts if name in held)
        elif by_row(shape, params[param]):
            pieces.sort(key=lambda piece: piece[0].start)
            whole[name] = np.concatenate([np.asarray(rows) for _, rows in pieces])
        else:
            whole[name] = np.asarray(pieces[0][1])
    return whole


def parameter_of(name: str, params: Mapping[str, Any]) -> str | None:
    """The parameter to which a leaf belongs: the longest path of one with which its own path ends."""
    parts = name.split("/")
    for first in range(len(parts)):
        if (path := "/".join(parts[first:])) in params:
            return path
    return None


def by_row(leaf: Any, param: Any) -> bool:
    """Whether a leaf has a row for each row of its parameter."""
    return len(leaf.shape) > 0 and leaf.shape[0] == param.shape[0]
