"""The fastest all-reduce: by measurements of this machine where there are some, else by the model."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxpar.collective_costs.links import ALGORITHMS, Algorithm, Group, Op
from jaxpar.collective_costs.model import seconds
from jaxpar.config import InputError
from jaxpar.hardware import Device


@dataclass(frozen=True)
class Measured:
    """What `jaxpar bench collectives` measured over one axis, on this machine.

    Attributes:
        source: the file.
        seconds_by_size: for each (op, algorithm, n, per_host), bytes and seconds, in ascending order of bytes.
    """

    source: str
    seconds_by_size: Mapping[tuple[str, str, int, int], tuple[tuple[int, float], ...]]

    def seconds(self, op: Op, algorithm: Algorithm, buffer_bytes: float, group: Group) -> float | None:
        """Time of a collective, or None where it was not measured for such a group."""
        points = self.seconds_by_size.get((op, algorithm, group.n, group.per_host))
        return seconds_between(points, buffer_bytes) if points else None


def seconds_between(points: Sequence[tuple[float, float]], buffer_bytes: float) -> float:
    """The time for a size among measured ones.

    Between two of them the logarithm of the time goes linearly with the logarithm of the size, so that times in
    proportion to bytes stay so. Smaller buffers take as long as the smallest that was measured, larger ones take as
    long in proportion as the largest.

    Args:
        points: bytes and seconds, in ascending order of bytes.
        buffer_bytes: the size.
    """
    (smallest, least), (largest, most) = points[0], points[-1]
    if buffer_bytes <= smallest:
        return least
    if buffer_bytes >= largest:
        return most * buffer_bytes / largest
    (low, t_low), (high, t_high) = next(p for p in itertools.pairwise(points) if p[1][0] > buffer_bytes)
    part = math.log(buffer_bytes / low) / math.log(high / low)
    return t_low * (t_high / t_low) ** part


def read_measured(path: str | Path, axis: str | None = "data", key: str = "grad_reduce.table") -> Measured:
    """Read the file that `jaxpar bench collectives --output` wrote.

    Args:
        path: the file.
        axis: the mesh axis whose rows count; None: all.
        key: which names the file, for errors.

    Raises:
        InputError: there is no such file, or it is another one; or nothing in it was measured over that axis.
    """
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
        found: dict[tuple[str, str, int, int], list[tuple[int, float]]] = {}
        for row in rows:
            if axis in (None, row["axis"]):
                group = row["op"], row["algorithm"], row["n"], row["per_host"]
                found.setdefault(group, []).append((int(row["bytes"]), float(row["seconds"])))
    except OSError as error:
        raise InputError(f"{key} = {path}: cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{key} = {path}: is not what `jaxpar bench collectives CONFIG --output FILE` writes ({error})."
        ) from None
    if not rows:
        raise InputError(f"{key} = {path}: has no measurement.")
    if not found:
        measured = sorted({row["axis"] for row in rows})
        raise InputError(
            f"{key} = {path}: has no measurement over {axis}, only over {', '.join(measured)}. "
            f"Run `jaxpar bench collectives` with mesh.{axis} larger than 1."
        )
    return Measured(str(path), {key: tuple(sorted(points)) for key, points in found.items()})


class Choice(NamedTuple):
    """What `choose` chose.

    Attributes:
        algorithm: the one with the least time.
        seconds: that time; None where nothing is known.
        reason: a sentence with the numbers, to print.
    """

    algorithm: Algorithm
    seconds: float | None
    reason: str


def choose(
    buffer_bytes: float,
    n: int,
    per_host: int,
    device: Device | None,
    table: Measured | None = None,
    across: Algorithm = "ring",
) -> Choice:
    """The fastest all-reduce: among those measured for such a group if there are any, else by the model.

    Args:
        buffer_bytes: what travels together, usually a bucket.
        n: devices.
        per_host: how many of them share a host.
        device: what they are; None: there is no model of them.
        table: measurements on this machine.
        across: the algorithm between hosts, for hierarchical, by the model.

    Example:
        >>> from jaxpar.hardware import DEVICES
        >>> print(choose(16e6, 64, 8, DEVICES["H100"]).reason)  # doctest: +NORMALIZE_WHITESPACE
        native: 0.495 ms by the model of H100 for an all-reduce of 16 MB among 64 devices, 8 per host;
        halving_doubling 0.575 ms, hierarchical 0.849 ms, ring 5.36 ms, tree 8.23 ms
        >>> print(choose(1e6, 2, 2, device=None).reason)
        native: there is no model of this machine, and no measured table
    """
    group = Group(n, per_host)
    candidates: list[Algorithm] = [a for a in ALGORITHMS if a != "hierarchical" or 1 < group.hosts < n]
    times: dict[Algorithm, float] = {}
    for a in candidates:
        if table and (measured := table.seconds("all-reduce", a, buffer_bytes, group)) is not None:
            times[a] = measured
    if times and table:
        how = f"as measured in {table.source}"
    elif device:
        times = {a: seconds("all-reduce", a, buffer_bytes, group, device, across) for a in candidates}
        how = f"by the model of {device.name}"
    else:
        lack = f"{table.source} measured no group of {n}, {group.per_host} per host" if table else "no measured table"
        return Choice("native", None, f"native: there is no model of this machine, and {lack}")
    best, *others = sorted(times, key=times.__getitem__)
    said = "; " + ", ".join(f"{a} {times[a] * 1e3:.3g} ms" for a in others) if others else ""
    what = f"an all-reduce of {buffer_bytes / 1e6:.4g} MB among {n} devices, {group.per_host} per host"
    return Choice(best, times[best], f"{best}: {times[best] * 1e3:.3g} ms {how} for {what}{said}")
