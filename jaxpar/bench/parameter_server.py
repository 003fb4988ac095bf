"""`jaxpar bench parameter-server`: servers × workers, next to all-reduce with as many replicas as there are workers.

What limits training with servers is the busiest of them: all gradients go into it and all parameters come out of it.
So beside steps and bytes per second each server counts, for a step, the bytes that it takes in and hands out, and the
CPU-seconds of its process. More servers divide both, and that shows also where all processes share a few cores, on
which steps per second cannot grow with their number.

Everything is of the same config and global batch, and each case has new processes, in one Ray. A worker is one replica.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import track

from jaxpar.bench.parameter_server_measured import WARM_UP, MeasuredActors, train_replicas, train_with_servers
from jaxpar.bench.parameter_server_report import draw, notes, tables
from jaxpar.config import Config, InputError
from jaxpar.data.sources import open_data
from jaxpar.mesh import stay_on_cpu, use_config_dtypes
from jaxpar.parameter_server.cluster import cluster
from jaxpar.parameter_server.slices import cut, nbytes
from jaxpar.parameter_server.whole import Whole, parameter_shapes
from jaxpar.planner.output import check_output

MODES = {"sync": ("sync",), "async": ("async",), "both": ("sync", "async")}
TAIL = 3
"""Steps after the measured ones in async mode, at whose very end parts of a batch are computed twice."""
# 10.2 million parameters and 64 tokens: there is more to send and to update than to compute. Only bytes occur as
# tokens, so that the embedding's gradient has few rows.
OWN = """
model: {architecture: llama, vocab_size: 4096, hidden_size: 384, intermediate_size: 1024, num_hidden_layers: 4,
        num_attention_heads: 8, tie_word_embeddings: false}
data: {train: ["{stdlib}/a*.py"], sequence_length: 8}
optimizer: {name: adamw, learning_rate: 1e-3, schedule: constant, clip_norm: 1.0}
train: {data_parallel: parameter_server, steps: 20, global_batch: 8, run_dir: unused, compute_dtype: float32}
parameter_server: {max_staleness: 8}
"""


def own_config(overrides: Sequence[str] = ()) -> Config:
    """What is measured when no config is given, with `key=value` overrides."""
    return Config.from_yaml_text(OWN, overrides, "the bench's own config")


# ------------------------------------------------------------------------------------------------------- the command


def read_counts(option: str, text: str) -> list[int]:
    """Numbers of processes, as `1,2,4` gives them.

    Raises:
        InputError: on anything else.

    Example:
        >>> read_counts("--servers", "2,1")
        [1, 2]
    """
    words = text.split(",")
    for word in words:
        if not (word.isascii() and word.isdecimal() and int(word) > 0):
            raise InputError(f"{option} {text}: {word!r} is no number of processes, at least 1. Write 1,2,4.")
    return sorted(set(map(int, words)))


def of_servers(config: Config, mode: str, servers: int, workers: int, steps: int) -> Config:
    """The config of a case: each worker is one replica of a config for all-reduce, or has the mesh that it has."""
    values = _to_measure(config, steps + (TAIL if mode == "async" else 0))
    values["train"]["data_parallel"] = "parameter_server"
    values["mesh"] |= {"data": _data_of_a_worker(config), "devices": None}
    counts = {"servers": servers, "workers": workers, "min_workers": workers}
    values["parameter_server"] |= {"mode": mode, **counts, "snapshot_every": values["train"]["steps"] + 1}
    return Config.from_dict(values, f"with --servers {servers} --workers {workers}")


def of_replicas(config: Config, workers: int, steps: int) -> Config:
    """The config with as many replicas as there are workers."""
    values = _to_measure(config, steps)
    values["train"]["data_parallel"] = "all_reduce"
    values["mesh"] |= {"data": workers * _data_of_a_worker(config), "devices": None}
    return Config.from_dict(values, f"all-reduce for --workers {workers}")


def _data_of_a_worker(config: Config) -> int:
    return config.mesh.data if config.train.data_parallel == "parameter_server" else 1


def _to_measure(config: Config, steps: int) -> dict[str, Any]:
    """The values of a config, with nothing but training steps in it."""
    values = config.model_dump(mode="json")
    values["train"] |= {"steps": WARM_UP + steps, "eval_every": None, "drift_check_every": None}
    values["data"]["validation"] = None
    return values


def run(
    config: Config,
    *,
    servers: str = "1,2,3",
    workers: str = "1,2,4",
    mode: str = "both",
    steps: int = 20,
    output: Path | None = None,
    plot: Path | None = None,
    as_json: bool = False,
) -> None:
    """Measure all cases, and print a table or JSON.

    A row has `training`, `mode`, `servers`, `workers`, `steps_per_second`, `bytes_per_second`, and of a step
    `workers_cpu_seconds`. With servers also, all of a step: `per_server` (`in_bytes` pushed, `out_bytes` pulled,
    `cpu_seconds`), of the busiest server `busiest_bytes`, `busiest_cpu_seconds` and `busiest_share` (of the step's
    time), `servers_cpu_seconds`, `coordinator_cpu_seconds`, `saved_bytes` (rows of zeros that were not pushed),
    `staleness`; and `refused`, gradients in all.

    Args:
        config: what is trained.
        servers: numbers of servers, as in `1,2,4`.
        workers: numbers of workers.
        mode: sync, async or both.
        steps: that are measured in each case.
        output: the JSON file of all rows.
        plot: a picture.
        as_json: print JSON.

    Raises:
        InputError: before anything starts.
        CheckFailed: a process died, or a case took too long.
    """
    if mode not in MODES:
        raise InputError(f"--mode {mode}: must be sync, async or both.")
    counts = read_counts("--servers", servers), read_counts("--workers", workers)
    if plot and find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib, which is not installed: pip install 'jaxpar[plot]'.")
    if plot and plot.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--plot {plot}: must end in .png, .svg or .pdf.")
    for option, file in (("--output", output), ("--plot", plot)):
        if file:
            check_output(option, file)
    cases = [of_servers(config, m, s, w, steps) for m in MODES[mode] for s in counts[0] for w in counts[1]]
    replicas = {w: of_replicas(config, w, steps) for w in counts[1]}
    cut(parameter_shapes(config), counts[0][-1], by_rows=True)  # refuses more servers than there are parameters
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "cores": os.cpu_count(),
            "on_this_machine": config.parameter_server.ray_address is None,
            "steps": steps,
            **_measure_all(cases, replicas, steps, Path(folder)),
        }
    if output:
        output.write_text(json.dumps(result), encoding="utf-8")
    if plot:
        draw(result, plot)
    if as_json:
        print(json.dumps(result))
        return
    console = Console()
    for table in tables(result):
        console.print(table)
    for line in notes(result):
        console.print(line)


def _measure_all(cases: Sequence[Config], replicas: Mapping[int, Config], steps: int, folder: Path) -> dict[str, Any]:
    """Bytes of the parameters, and rows of all-reduce, then of all cases."""
    tokens, progress = folder / "tokens", Console(stderr=True)
    open_data(cases[0], tokens)  # so that text is made into tokens once
    stay_on_cpu()
    use_config_dtypes(cases[0])
    rows, on_cpu, state, param_bytes = [], {}, None, 0
    with cluster(cases[0].parameter_server.ray_address):
        for number, case in enumerate(track(cases, "servers and workers", console=progress, transient=True)):
            whole = Whole(case)
            if state is None:
                state = jax.device_get(whole.program.init())
                param_bytes = sum(map(nbytes, whole.params.values()))
            actors = MeasuredActors(case, whole.slices, folder / str(number), folder)
            on_cpu[case.workers] = not actors.gpus
            rows.append(train_with_servers(case, actors, whole.parts(state), steps))
    reduced = track(replicas, "all-reduce", console=progress, transient=True)
    rows = [*(train_replicas(replicas[w], tokens, on_cpu=on_cpu[w]) for w in reduced), *rows]
    return {"param_bytes": param_bytes, "rows": rows}
