"""`jaxpar bench matmul`: how fast this machine's device multiplies matrices, by size and dtype, for `jaxpar plan`."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxpar import mesh
from jaxpar.hardware import SHARE_OF_PEAK, Device, find
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.output import CLUSTER, check_cluster_file, sealed

SIZES = tuple(2**n for n in range(7, 15))
"""Rows and columns of the matrices: 128 to 16,384."""
DTYPES = ("bfloat16", "float32")
EACH_SECONDS = 0.1
"""One measurement of one size goes on for about so long."""
LONGEST_SECONDS = 2.0
"""A size is left out when the one before says that a single multiplication takes longer."""


def measure(
    sizes: Sequence[int] = SIZES,
    dtypes: Sequence[str] = DTYPES,
    repeats: int = 3,
    each_seconds: float = EACH_SECONDS,
    longest_seconds: float = LONGEST_SECONDS,
) -> Iterator[dict[str, Any]]:
    """Time products of two square matrices on the first device.

    Args:
        sizes: rows and columns, ascending.
        dtypes: of the matrices; float32 as XLA multiplies it by default, in TF32 on GPUs that have it.
        repeats: measurements of each size; the best counts.
        each_seconds: about how long a measurement goes on.
        longest_seconds: of one product; larger sizes are left out.

    Yields:
        `dtype`, `size`, `seconds` of one product, `flops_per_second`.
    """
    for dtype in dtypes:
        for size in sizes:
            seconds = _seconds(_chain(size, dtype), repeats, each_seconds)
            yield {"dtype": dtype, "size": size, "seconds": seconds, "flops_per_second": 2 * size**3 / seconds}
            if 8 * seconds > longest_seconds:
                break


def _chain(size: int, dtype: str) -> Callable[[int], Any]:
    """A call that makes so many products one after the other, each of the one before, and waits for the last.

    x ← x b + a with b scaled so that x neither grows nor vanishes: special numbers may be multiplied slower.
    """
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.float32) for i in range(2))
    a, b = a.astype(dtype), (b / (2 * size**0.5)).astype(dtype)
    run = jax.jit(lambda a, b, count: lax.fori_loop(0, count, lambda _, x: x @ b + a, a))
    return lambda count: jax.block_until_ready(run(a, b, count))


def _seconds(chain: Callable[[int], Any], repeats: int, each_seconds: float) -> float:
    """The least wall time of one product."""
    chain(1)
    count, taken = 1, _wall_seconds(chain, 1)
    while taken < each_seconds / 2 and count < 10**6:  # until starting it does not count
        count *= max(2, min(100, round(each_seconds / max(taken, 1e-9))))
        taken = _wall_seconds(chain, count)
    return min([taken, *(_wall_seconds(chain, count) for _ in range(repeats - 1))]) / count


def _wall_seconds(chain: Callable[[int], Any], count: int) -> float:
    before = time.perf_counter()
    chain(count)
    return time.perf_counter() - before


def memory_bytes_per_second(size: int = 2**26) -> float:
    """Bytes read and written by the first device while it adds 1 to so many float32 numbers."""
    x = jnp.zeros(size, jnp.float32)
    add = jax.jit(lambda x, count: lax.fori_loop(0, count, lambda _, x: x + 1, x))
    return 8 * size / _seconds(lambda count: jax.block_until_ready(add(x, count)), repeats=3, each_seconds=EACH_SECONDS)


def cluster(rows: Sequence[dict[str, Any]]) -> Cluster:
    """This host as a cluster whose matrix multiplications are as measured.

    A device that is not in `jaxpar.hardware` gets the best measured rate as its peak, and its links the rate of its
    memory: right for virtual CPU devices, and to be corrected by hand for others.
    """
    local = jax.local_devices()[0]
    device = find(local.device_kind)
    if device is None:
        peak = max(row["flops_per_second"] / SHARE_OF_PEAK[row["dtype"]] for row in rows)
        rate = memory_bytes_per_second()
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
        source = f"jaxpar bench matmul on {local.device_kind}; links by the rate of memory"
        device = Device(local.device_kind.lower(), source, peak, size, rate, rate, rate)
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        share = row["flops_per_second"] / (device.flops_per_second * SHARE_OF_PEAK[row["dtype"]])
        curves.setdefault(row["dtype"], []).append((row["size"], float(f"{min(share, 1.0):.4g}")))
    matmul = {dtype: tuple(points) for dtype, points in curves.items()}
    return Cluster(device, 1, jax.local_device_count(), matmul=matmul)


def run(*, output: Path | None = None, as_json: bool = False) -> None:
    """Measure, write a cluster file for `jaxpar plan --cluster` where one is named, and print a table or JSON.

    Args:
        output: a .yaml file.
        as_json: JSON instead of a table.

    Raises:
        InputError: when the file cannot be written there, or holds something else.
    """
    if output:
        check_cluster_file(output)
    if mesh._gpu_plugin_without_driver():
        mesh.stay_on_cpu()
    kind = jax.local_devices()[0].device_kind
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("multiplying", total=len(SIZES) * len(DTYPES))
        for row in measure():
            rows.append(row)
            done = DTYPES.index(row["dtype"]) * len(SIZES) + SIZES.index(row["size"]) + 1
            progress.update(task, completed=done, description=f"{row['dtype']} {row['size']}")
    if output:
        comment = f"# Measured by `jaxpar bench matmul` on {kind}. For `jaxpar plan --cluster {output}`; set hosts.\n"
        output.write_text(sealed(comment + cluster(rows).to_yaml(), CLUSTER), encoding="utf-8")
    if as_json:
        print(json.dumps({"device": kind, "rows": rows}))
        return
    device, table = find(kind), Table(title=f"Products of square matrices on {kind}")
    for column in ("dtype", "size", "time", "TFLOP/s", "of the peak"):
        table.add_column(column, justify="left" if column == "dtype" else "right")
    for row in rows:
        peak = device.flops_per_second * SHARE_OF_PEAK[row["dtype"]] if device else None
        share = f"{row['flops_per_second'] / peak:.0%}" if peak else "–"
        rate = f"{row['flops_per_second'] / 1e12:.3g}"
        table.add_row(row["dtype"], str(row["size"]), f"{row['seconds'] * 1e3:.3g} ms", rate, share)
    Console().print(table)
    if output:
        print(f"written to {output}")
