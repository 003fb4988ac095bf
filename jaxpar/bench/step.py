"""`jaxpar bench step`: the train step against a plain Flax + optax + `NamedSharding` program, pair by pair.

CPU-seconds are user + system time of this process: on a shared machine they move far less than wall time, and on
virtual CPU devices they are the work that the step does.
"""

import json
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxpar.bench.plain import plain_step
from jaxpar.config import Config
from jaxpar.mesh import make_mesh, use_cpu_devices
from jaxpar.step import build
from jaxpar.verify import random_batch

MODEL = {
    "architecture": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}
LAYOUTS = ({"data": 8, "tensor": 1}, {"data": 1, "tensor": 8})


def bench_config(layout: dict[str, int]) -> Config:
    """The model of about 8M parameters that is measured: float32, sequence 128, batch 16."""
    return Config.model_validate(
        {
            "model": MODEL,
            "mesh": layout,
            "data": {"train": ["unused"], "sequence_length": 128},
            "optimizer": {"name": "adamw", "learning_rate": 1e-3, "schedule": "constant", "clip_norm": 1.0},
            "train": {
                "steps": 1,
                "global_batch": 16,
                "run_dir": "unused",
                "param_dtype": "float32",
                "compute_dtype": "float32",
            },
        }
    )


def cpu_seconds(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any, steps: int) -> tuple[float, Any]:
    """User and system seconds of this process per step, and the state after."""
    before = os.times()
    for _ in range(steps):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    after = os.times()
    return (after.user + after.system - before.user - before.system) / steps, state


def measure(layout: dict[str, int], pairs: int, steps: int) -> dict[str, Any]:
    """Time both programs in turn on one layout.

    Returns:
        `mesh`; `jaxpar_cpu_seconds` and `plain_cpu_seconds`, medians per step; `ratio`, the median over pairs of
        jaxpar over plain; `ratios`, all of them.
    """
    config = bench_config(layout)
    mesh = make_mesh(data=layout["data"], tensor=layout["tensor"])
    program = build(config, mesh)
    batch = jax.device_put(random_batch(config), program.batch_sharding)
    plain, plain_state = plain_step(config, mesh)
    state = program.init()
    _, state = cpu_seconds(program.train_step, state, batch, 1)
    _, plain_state = cpu_seconds(plain, plain_state, batch, 1)
    ours, theirs = [], []
    for pair in track(range(pairs), f"mesh {layout}", console=Console(stderr=True), transient=True):
        for mine in (True, False) if pair % 2 else (False, True):  # neither always runs on the warmer cache
            if mine:
                seconds, state = cpu_seconds(program.train_step, state, batch, steps)
                ours.append(seconds)
            else:
                seconds, plain_state = cpu_seconds(plain, plain_state, batch, steps)
                theirs.append(seconds)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "mesh": layout,
        "jaxpar_cpu_seconds": statistics.median(ours),
        "plain_cpu_seconds": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def run(*, pairs: int = 7, steps: int = 4, as_json: bool = False, layouts: Sequence[dict[str, int]] = LAYOUTS) -> None:
    """Measure every layout on 8 virtual CPU devices and print a table or JSON."""
    use_cpu_devices(8)
    rows = [measure(layout, pairs, steps) for layout in layouts]
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(title=f"CPU-seconds per step, medians of {pairs} pairs of {steps} steps")
    for column in ("mesh", "jaxpar", "plain", "jaxpar / plain", "range"):
        table.add_column(column)
    for row in rows:
        axes = " × ".join(f"{name} {size}" for name, size in row["mesh"].items())
        span = f"{min(row['ratios']):.3f} – {max(row['ratios']):.3f}"
        seconds = (f"{row[key]:.3f}" for key in ("jaxpar_cpu_seconds", "plain_cpu_seconds", "ratio"))
        table.add_row(axes, *seconds, span)
    Console().print(table)
