"""`jaxpar bench pipeline`: our pipeline against a scanned GPipe and against data parallelism, pair by pair."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxpar.bench.pairs import compare, cpu_seconds, table
from jaxpar.bench.scanned_gpipe import scanned_gpipe
from jaxpar.bench.step import bench_config, our_step
from jaxpar.config import Config
from jaxpar.mesh import make_mesh, use_cpu_devices
from jaxpar.step import abstract_batch, build
from jaxpar.verify import random_batch

SEQUENCES = 2  # in a microbatch
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("1f1b", 2))  # and chunks


def pipeline_config(microbatches: int, sequences: int = SEQUENCES, **parallel: Any) -> Config:
    """Pipe 4, with as many microbatches of so many sequences."""
    settings = {"microbatches": microbatches, **parallel}
    return bench_config({"pipe": 4}, global_batch=sequences * microbatches, parallel=settings)


def gradients(config: Config, *, opponent: bool = False) -> tuple[Callable[[], Any], float]:
    """A call that computes loss and gradients once, ours or the scanned GPipe's, and its compile CPU-seconds."""
    mesh = make_mesh(config.mesh.data, config.mesh.pipe, config.mesh.tensor)
    program = build(config, mesh)
    params = program.init().params
    batch = jax.device_put(random_batch(config), program.batch_sharding)
    if opponent:
        lowered = scanned_gpipe(config, mesh).lower(params, batch)
        args: tuple[Any, ...] = (params, batch)
    else:
        step = jax.device_put(np.int32(0), jax.NamedSharding(mesh, jax.P()))
        lowered, args = program.loss_and_grads.lower(params, batch, step), (params, batch, step)
    compiled: list[Any] = []
    seconds = cpu_seconds(lambda: compiled.append(lowered.compile()))
    return lambda: jax.block_until_ready(compiled[0](*args)), seconds


def against_scanned_gpipe(microbatches: int, pairs: int) -> dict[str, Any]:
    """1F1B with full remat against a scanned GPipe without: time, and `compile_ratio`."""
    config = pipeline_config(microbatches, remat="full")
    ours, our_compile = gradients(config)
    theirs, their_compile = gradients(config, opponent=True)
    name = f"1f1b, remat full, {microbatches} microbatches / scanned GPipe, no remat"
    return {
        "name": name,
        **compare(ours, theirs, pairs, name),
        "compile_ratio": our_compile / their_compile,
    }


def against_data_parallel(mesh: dict[str, int], pairs: int) -> dict[str, Any]:
    """The whole train step on a mesh with pipe, 8 microbatches, against ours on data 8 with the same global batch."""
    batch = 8 * mesh["data"] * SEQUENCES
    ours = our_step(bench_config(mesh, global_batch=batch, parallel={"microbatches": 8}), 1)
    theirs = our_step(bench_config({"data": 8}, global_batch=batch), 1)
    name = " × ".join(f"{axis} {size}" for axis, size in mesh.items()) + " / data 8"
    return {"name": name, **compare(ours, theirs, pairs, name)}


def bubble(pairs: int, counts: tuple[int, ...] = (4, 8, 16, 32)) -> dict[str, Any]:
    """CPU-seconds of a step over the number of microbatches M, fitted by a line: time = slope · (M + idle).

    With `idle: compute` every tick costs the same, so that `idle` comes out as S - 1 = 3 where the bubble is the
    formula's (S - 1) / (M + S - 1).
    """
    calls = [gradients(pipeline_config(m, remat="full", idle="compute"))[0] for m in counts]
    seconds = np.array([[cpu_seconds(call) for call in calls] for _ in range(pairs + 1)][1:])
    slope, intercept = np.polyfit(counts, np.median(seconds, axis=0), 1)
    return {"microbatches": counts, "cpu_seconds": np.median(seconds, axis=0).tolist(), "idle": intercept / slope}


def memory(counts: tuple[int, ...] = (8, 32, 64)) -> list[dict[str, Any]]:
    """Compiled temporary bytes of one device for each schedule × remat × number of microbatches, pipe 4.

    Nothing runs: the figures are the compiler's (`memory_analysis()`), for stages that compute when idle.
    """
    rows = []
    for (schedule, chunks), remat in itertools.product(SCHEDULES, ("none", "dots", "full")):
        sizes = []
        for m in counts:
            parallel = {"schedule": schedule, "chunks": chunks, "remat": remat, "idle": "compute"}
            config = pipeline_config(m, 2 * SEQUENCES, **parallel)
            program = build(config, make_mesh(pipe=4))
            args = program.abstract_state.params, abstract_batch(config, program), jax.ShapeDtypeStruct((), np.int32)
            analysis = program.loss_and_grads.lower(*args).compile().memory_analysis()
            assert analysis is not None, "every backend that jaxpar runs on tells"
            sizes.append(analysis.temp_size_in_bytes)
        rows.append(
            {"schedule": schedule, "chunks": chunks, "remat": remat, "microbatches": counts, "temp_bytes": sizes}
        )
    return rows


def run_memory(*, as_json: bool = False) -> None:
    """Print `memory` as a table or JSON."""
    use_cpu_devices(8)
    rows = memory()
    if as_json:
        print(json.dumps(rows))
        return
    out = Table(title="Temporaries of one device in MB by number of microbatches of 4 sequences, pipe 4")
    for column in ("schedule", "chunks", "remat", *map(str, rows[0]["microbatches"])):
        out.add_column(column)
    for row in rows:
        sizes = (f"{size / 1e6:.1f}" for size in row["temp_bytes"])
        out.add_row(row["schedule"], str(row["chunks"]), row["remat"], *sizes)
    Console().print(out)


def run(*, pairs: int = 5, as_json: bool = False) -> None:
    """Measure on virtual CPU devices and print tables or JSON."""
    use_cpu_devices(8)
    gpipe = [against_scanned_gpipe(m, pairs) for m in (8, 32)]
    data = [
        against_data_parallel(mesh, pairs)
        for mesh in ({"data": 2, "pipe": 2, "tensor": 2}, {"data": 2, "pipe": 4, "tensor": 1})
    ]
    line = bubble(pairs)
    if as_json:
        print(json.dumps({"scanned_gpipe": gpipe, "data_parallel": data, "bubble": line}))
        return
    console = Console()
    console.print(table(f"CPU-seconds of loss and gradients, pipe 4, medians of {pairs} pairs", gpipe))
    for row in gpipe:
        console.print(f"compile time, {row['name']}: {row['compile_ratio']:.2f}")
    console.print(table(f"CPU-seconds of a train step, 8 microbatches, medians of {pairs} pairs", data))
    console.print(f"a step costs as much as M + {line['idle']:.2f} microbatches (formula: M + 3)")
