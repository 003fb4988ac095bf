"""`jaxpar bench collectives`: every all-reduce algorithm over sizes and mesh axes, reported as nccl-tests does.

The algorithm bandwidth is bytes / time. The bus bandwidth is that times 2(n-1)/n for n devices: what each link
carries when an all-reduce wastes nothing, and so comparable between numbers of devices (NVIDIA/nccl-tests,
doc/PERFORMANCE.md). All groups along an axis reduce at the same time, as they do in training.
"""

import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxpar.bench.links import measure_links
from jaxpar.collective_costs import ALGORITHMS
from jaxpar.collectives import Reduction, varying
from jaxpar.collectives.choosing import neighbours_per_host
from jaxpar.config import Config, GradReduceConfig, InputError
from jaxpar.mesh import DATA

SMALLEST = 2**10
CALLS, CALLED_BYTES = 20, 2**25
"""All-reduces in one measurement: as many as nccl-tests makes, fewer where they would come to more bytes."""
LARGEST_ON_CPU = 2**22
SHARE_OF_MEMORY = 16
"""A buffer has at most this part of the device's memory: beside it are its sum and the algorithm's copies."""


def reductions(settings: GradReduceConfig, mesh: Mesh, axis: str) -> list[Reduction]:
    """What can be measured over an axis: hierarchical only where it has several hosts of several devices each."""
    n, per_host = mesh.shape[axis], _per_host(settings, mesh, axis)
    names = [name for name in ALGORITHMS if name != "hierarchical" or 1 < per_host < n]
    shared: dict[str, Any] = {"axis": axis, "per_host": per_host, "across": settings.across, "bucket_bytes": 2**62}
    return [Reduction(name, **shared) for name in names]


def _per_host(settings: GradReduceConfig, mesh: Mesh, axis: str) -> int:
    return settings.per_host if axis == DATA and settings.per_host else neighbours_per_host(mesh, axis)


def default_sizes(largest: int | None = None) -> list[int]:
    """1 KB and its doubles up to `largest`, in bytes; by default to what fits, or 4 MB on CPU."""
    device = jax.local_devices()[0]
    if largest is None:
        stats = device.memory_stats() if device.platform != "cpu" else None
        largest = stats["bytes_limit"] // SHARE_OF_MEMORY if stats else LARGEST_ON_CPU
    return [2**k for k in range(SMALLEST.bit_length() - 1, largest.bit_length())]


def measure(
    mesh: Mesh, candidates: Sequence[Reduction], sizes: Sequence[int], repeats: int
) -> Iterator[dict[str, Any]]:
    """Time all-reduces of float32 buffers, the candidates in turn, so that a machine that drifts drifts for all.

    Args:
        mesh: of the devices.
        candidates: what to measure; each names its axis.
        sizes: bytes of the buffer that each device has, at least 4.
        repeats: measurements of which the median counts.

    Yields:
        For each size and candidate: `axis`, `n`, `per_host`, `op`, `algorithm`, `bytes`, `seconds`, and the bandwidths
        `algorithm_bytes_per_second` and `bus_bytes_per_second`.
    """
    for size in sizes:
        calls = max(1, min(CALLS, CALLED_BYTES // size))  # the same in all processes
        programs = [timed_all_reduce(mesh, reduction, size // 4) for reduction in candidates]
        rounds = [[program(calls) for program in programs] for _ in range(repeats + 1)][1:]  # the first compiles
        for reduction, times in zip(candidates, zip(*rounds, strict=True), strict=True):
            yield _row(reduction, mesh.shape[reduction.axis], size, statistics.median(times))


def timed_all_reduce(mesh: Mesh, reduction: Reduction, elements: int) -> Callable[[int], float]:
    """A call that makes so many all-reduces, each of the mean before, and returns the wall seconds of each."""

    def of_block(x_1N: jax.Array, calls: jax.Array) -> jax.Array:
        again = lambda _, x_1N: varying(reduction.mean(x_1N), reduction.axis)
        return lax.fori_loop(0, calls, again, x_1N)

    split = P(reduction.axis)
    run = jax.jit(jax.shard_map(of_block, mesh=mesh, in_specs=(split, P()), out_specs=split))
    shape = mesh.shape[reduction.axis], elements
    x_nN = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=jax.NamedSharding(mesh, split))()

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(x_nN, jnp.int32(calls)))
        return (time.perf_counter() - start) / calls

    return seconds


def _row(reduction: Reduction, n: int, size: int, seconds: float) -> dict[str, Any]:
    return {
        "axis": reduction.axis,
        "n": n,
        "per_host": reduction.per_host,
        "op": "all-reduce",
        "algorithm": reduction.algorithm,
        "bytes": size,
        "seconds": seconds,
        "algorithm_bytes_per_second": size / seconds,
        "bus_bytes_per_second": 2 * (n - 1) / n * size / seconds,
    }


def table(rows: Sequence[dict[str, Any]], repeats: int) -> Table:
    """Rows of one axis for people, the fastest algorithm of each size in bold."""
    first = rows[0]
    title = f"All-reduce over {first['axis']}: {first['n']} devices, {first['per_host']} per host, float32"
    out = Table(title=title, caption=f"medians of {repeats}")
    for column in ("bytes", "algorithm", "time µs", "algorithm GB/s", "bus GB/s"):
        out.add_column(column, justify="left" if column == "algorithm" else "right")
    for size in dict.fromkeys(row["bytes"] for row in rows):
        same = [row for row in rows if row["bytes"] == size]
        fastest = min(same, key=lambda row: row["seconds"])
        for row in same:
            rates = (f"{row[key] / 1e9:.3f}" for key in ("algorithm_bytes_per_second", "bus_bytes_per_second"))
            style = "bold" if row is fastest else None
            shown = f"{size:,}", row["algorithm"], f"{row['seconds'] * 1e6:,.1f}", *rates
            out.add_row(*shown, style=style, end_section=row is same[-1])
    return out


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Bus bandwidth over size, a line for each algorithm and a picture for each axis, into a .png, .svg or .pdf."""
    from matplotlib.figure import Figure

    axes = list(dict.fromkeys(row["axis"] for row in rows))
    figure = Figure(figsize=(6 * len(axes), 4.5), layout="constrained")
    for axis, picture in zip(axes, figure.subplots(1, len(axes), squeeze=False)[0], strict=True):
        for algorithm in ALGORITHMS:
            line = [r for r in rows if r["axis"] == axis and r["algorithm"] == algorithm]
            if line:
                bandwidths = [r["bus_bytes_per_second"] / 1e9 for r in line]
                picture.loglog([r["bytes"] for r in line], bandwidths, marker=".", label=algorithm)
        n = next(r["n"] for r in rows if r["axis"] == axis)
        picture.set(title=f"all-reduce over {axis}, {n} devices", xlabel="bytes", ylabel="bus bandwidth GB/s")
        picture.grid(alpha=0.3)
        picture.legend()
    figure.savefig(file, dpi=150)


# ------------------------------------------------------------------------------------------------------- the command


def axes_to_measure(mesh: Mesh, axis: str | None) -> list[str]:
    """The axis that was asked for, or all that have more than one device.

    Raises:
        InputError: when there is nothing to reduce over.
    """
    larger = [name for name, size in mesh.shape.items() if size > 1]
    if axis is not None and axis not in larger:
        sizes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
        raise InputError(f"--axis {axis}: must be an axis of more than one device; the mesh has {sizes}.")
    if not larger:
        raise InputError("all axes of the mesh have one device: nothing is reduced. Set mesh.data, for instance, to 2.")
    return [axis] if axis else larger


def read_sizes(text: str) -> list[int]:
    """Buffer sizes in bytes as `1K,64K,1M` gives them; K, M and G are powers of 1024.

    Raises:
        InputError: on anything else, and below 4 bytes.

    Example:
        >>> read_sizes("512,4K,1M")
        [512, 4096, 1048576]
    """
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = []
    for word in text.split(","):
        number, unit = (word[:-1], units[word[-1]]) if word[-1:] in units else (word, 1)
        if not number.isdecimal() or int(number) * unit < 4:
            raise InputError(f"--sizes {text}: {word!r} is no size. Write bytes, at least 4, as in 1024,64K,1M,1G.")
        sizes.append(int(number) * unit // 4 * 4)
    return sizes


def run(
    config: Config,
    mesh: Mesh,
    *,
    axis: str | None = None,
    sizes: str | None = None,
    max_bytes: int | None = None,
    repeats: int = 5,
    output: Path | None = None,
    plot: Path | None = None,
    links: Path | None = None,
    as_json: bool = False,
) -> None:
    """Measure, and print tables or JSON; write what `grad_reduce.table` and `grad_reduce.links` read.

    Args:
        config: its `grad_reduce.per_host` and `grad_reduce.across` say what hierarchical does.
        mesh: its mesh.
        axis: the mesh axis; by default all with more than one device.
        sizes: as `read_sizes` takes them; by default `default_sizes(max_bytes)`.
        max_bytes: of the largest buffer.
        repeats: measurements of which the median counts.
        output: the JSON file of all rows.
        plot: a picture of the bus bandwidths.
        links: measure the links between the replicas, too, and write their matrix here.
        as_json: print JSON.

    Raises:
        InputError: before anything is measured.
    """
    axes = axes_to_measure(mesh, axis)
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib, which is not installed: pip install 'jaxpar[plot]'.")
    for file in (output, plot, links):
        if file and not file.parent.is_dir():
            raise InputError(f"{file}: there is no folder {file.parent}.")
        if file and file.is_dir():
            raise InputError(f"{file}: is a folder. Give the name of a file in it.")
    if plot and plot.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--plot {plot}: must end in .png, .svg or .pdf.")
    if links and mesh.shape[DATA] == 1:
        raise InputError("--links: mesh.data is 1, there are no links between replicas.")
    bytes_each = read_sizes(sizes) if sizes else default_sizes(max_bytes)
    rows: list[dict[str, Any]] = []
    main = jax.process_index() == 0
    progress = Console(stderr=True, quiet=not main)
    for name in axes:
        candidates = reductions(config.grad_reduce, mesh, name)
        found = measure(mesh, candidates, bytes_each, repeats)
        total = len(candidates) * len(bytes_each)
        rows += track(found, f"all-reduce over {name}", total, console=progress, transient=True)
    matrix = measure_links(mesh, bytes_each[-1], repeats, progress) if links else None
    if not main:
        return
    kind = mesh.devices.flat[0].device_kind
    result = {"device": kind, "mesh": dict(mesh.shape), "dtype": "float32", "repeats": repeats, "rows": rows}
    if output:
        output.write_text(json.dumps(result), encoding="utf-8")
    if links:
        links.write_text(json.dumps(matrix), encoding="utf-8")
    if plot:
        draw(rows, plot)
    if as_json:
        print(json.dumps(result))
        return
    for name in axes:
        Console().print(table([row for row in rows if row["axis"] == name], repeats))
