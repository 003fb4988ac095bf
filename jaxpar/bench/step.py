"""`jaxpar bench step`: the train step against a plain Flax + optax + `NamedSharding` program, pair by pair."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
from rich.console import Console

from jaxpar.bench.pairs import compare, table
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


def bench_config(mesh: dict[str, int], *, global_batch: int = 16, parallel: dict[str, Any] | None = None) -> Config:
    """The model of about 8M parameters that is measured: float32, sequences of 128 tokens."""
    return Config.from_dict(
        {
            "model": MODEL,
            "mesh": mesh,
            "parallel": parallel or {},
            "data": {"train": ["unused"], "sequence_length": 128},
            "optimizer": {"name": "adamw", "learning_rate": 1e-3, "schedule": "constant", "clip_norm": 1.0},
            "train": {
                "steps": 1,
                "global_batch": global_batch,
                "run_dir": "unused",
                "param_dtype": "float32",
                "compute_dtype": "float32",
            },
        }
    )


def stepper(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any, steps: int) -> Callable[[], Any]:
    """A call that makes `steps` steps from where it left off, and waits for them."""

    def work() -> None:
        nonlocal state
        for _ in range(steps):
            state, _ = step(state, batch)
        jax.block_until_ready(state)

    return work


def our_step(config: Config, steps: int) -> Callable[[], Any]:
    """A `stepper` of the train step that a config gives."""
    program = build(config, make_mesh(config.mesh.data, config.mesh.pipe, config.mesh.tensor))
    batch = jax.device_put(random_batch(config), program.batch_sharding)
    return stepper(program.train_step, program.init(), batch, steps)


def measure(layout: dict[str, int], pairs: int, steps: int) -> dict[str, Any]:
    """Time both programs in turn on one layout; see `jaxpar.bench.pairs.compare`, with `mesh` added."""
    config = bench_config(layout)
    mesh = make_mesh(data=layout["data"], tensor=layout["tensor"])
    plain, state = plain_step(config, mesh)
    batch = jax.device_put(random_batch(config), jax.NamedSharding(mesh, jax.P("data")))
    name = " × ".join(f"{axis} {size}" for axis, size in layout.items())
    times = compare(our_step(config, steps), stepper(plain, state, batch, steps), pairs, name)
    return {"name": name, "mesh": layout, **times}


def run(*, pairs: int = 7, steps: int = 4, as_json: bool = False, layouts: Sequence[dict[str, int]] = LAYOUTS) -> None:
    """Measure every layout on 8 virtual CPU devices and print a table or JSON."""
    use_cpu_devices(8)
    rows = [measure(layout, pairs, steps) for layout in layouts]
    if as_json:
        print(json.dumps(rows))
    else:
        Console().print(table(f"CPU-seconds of {steps} steps against plain Flax + optax, {pairs} pairs", rows))
