"""Parameter servers that count what they do, and all-reduce training of the same config, timed."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.config import CheckFailed, Config
from jaxpar.data.batches import Batches
from jaxpar.data.sources import open_data
from jaxpar.mesh import start
from jaxpar.parameter_server.actors import RayActors
from jaxpar.parameter_server.coordinator import Coordinator, RolledBack, Update
from jaxpar.parameter_server.rows import Sent, sent_bytes
from jaxpar.parameter_server.server import Server
from jaxpar.parameter_server.slices import Slices
from jaxpar.parameter_server.worker import Worker
from jaxpar.step import abstract_batch, build

WARM_UP = 3
"""Steps that do not count: in them everything is used for the first time."""
START_SECONDS, STEP_SECONDS = 600, 30
"""The longest that a case may take: to start and compile, and for each step."""


class MeasuredServer(Server):
    """A server that counts what comes and goes."""

    def __init__(
        self, config: Config, index: int, slices: Slices, folder: str, put: Callable[[Any], Any] = lambda value: value
    ) -> None:
        super().__init__(config, index, slices, folder, lambda sent: (sent_bytes(sent), put(sent)))
        self._in_bytes = self._out_bytes = 0

    def push(self, update: int, share: int, tokens: float, grads: Mapping[str, Sent]) -> bool:
        """Take a share of an update."""
        self._in_bytes += sent_bytes(grads)
        return super().push(update, share, tokens, grads)

    def pull(self, since: int | None, predicted: bool = False) -> tuple[int, Any]:
        """See `Server.pull`."""
        version, (size, sent) = super().pull(since, predicted)
        self._out_bytes += size
        return version, sent

    def totals(self) -> dict[str, float]:
        """Bytes of gradients in and of parameters out, and CPU-seconds of this process, since its start."""
        return {"in_bytes": self._in_bytes, "out_bytes": self._out_bytes, "cpu_seconds": time.process_time()}


class MeasuredWorker(Worker):
    """A worker that tells its CPU time."""

    def totals(self) -> dict[str, float]:
        """CPU-seconds of this process since its start."""
        return {"cpu_seconds": time.process_time()}


class MeasuredActors(RayActors):
    """Both as Ray actors.

    Attributes:
        workers: handles of those that were started.
    """

    def __init__(self, config: Config, slices: Sequence[Slices], folder: Path, run_dir: Path) -> None:
        super().__init__(config, slices, folder, run_dir, worker=MeasuredWorker, server=MeasuredServer)
        self.workers: list[Any] = []

    def worker(self, index: int) -> Any:
        """Start worker `index`."""
        self.workers.append(super().worker(index))
        return self.workers[-1]


def train_with_servers(config: Config, actors: Any, parts: Sequence[Any], steps: int) -> dict[str, Any]:
    """`measure`, bounded in time.

    Raises:
        CheckFailed: a process died, or it took too long.
    """
    try:
        return asyncio.run(asyncio.wait_for(measure(config, actors, parts, steps), _limit_seconds(config)))
    except TimeoutError:
        settings = config.parameter_server
        raise _too_slow(config, f"training with {settings.servers} servers and {settings.workers} workers") from None


async def measure(config: Config, actors: Any, parts: Sequence[Any], steps: int) -> dict[str, Any]:
    """Train `WARM_UP` steps, then as many as are measured.

    Args:
        config: of the case.
        actors: `MeasuredActors`, or what does as they do.
        parts: each server's parameters and optimizer state to begin with.
        steps: to measure.

    Returns:
        A row: see `jaxpar.bench.parameter_server.run`.

    Raises:
        CheckFailed: a process died.
    """
    marks: list[tuple[int, float, float, asyncio.Future[Any]]] = []
    measured: list[Update] = []
    troubles: list[str] = []

    def mark() -> asyncio.Future[Any]:
        calls = coordinator.servers.call("totals"), [worker.totals.remote() for worker in actors.workers]
        totals = asyncio.gather(*(asyncio.gather(*kind) for kind in calls))
        marks.append((coordinator.version, time.perf_counter(), time.process_time(), totals))
        return totals

    def on_step(step: int, updates: Sequence[Update]) -> None:
        if WARM_UP < step <= WARM_UP + steps:
            measured.extend(updates)
        if asynchronous and step in (WARM_UP, WARM_UP + steps):
            mark()  # workers go on: between batches nobody waits

    asynchronous = config.parameter_server.mode == "async"
    coordinator = Coordinator(config, actors, 0, (0, 0), lambda event, text, **numbers: troubles.append(text), on_step)
    try:
        await coordinator.start(parts)
        with suppress(RolledBack):  # which is among the troubles
            if asynchronous:
                await coordinator.steps(0, config.train.steps)
            else:
                for first, stop in ((0, WARM_UP), (WARM_UP, config.train.steps)):
                    await coordinator.steps(first, stop)
                    if not troubles:
                        await mark()
        if troubles:
            raise CheckFailed(f"the measurement is worth nothing: {'; '.join(troubles)}")
        (first, began, cpu_before, before), (last, ended, cpu_after, after) = marks
        # In async mode other updates than those of these steps may lie between the marks.
        passed = (last - first) / coordinator.per_step
        if not passed:
            raise CheckFailed("updates were so far apart that no time passed between steps. Measure more --steps.")
        servers, workers = [
            [_each(*process, passed) for process in zip(*kind, strict=True)]
            for kind in zip(await before, await after, strict=True)
        ]
    finally:
        await coordinator.close()
    step_seconds = (ended - began) / passed
    busiest_seconds = max(server["cpu_seconds"] for server in servers)
    total = lambda kind: sum(process["cpu_seconds"] for process in kind)
    return {
        "training": "parameter_server",
        "mode": config.parameter_server.mode,
        "servers": len(servers),
        "workers": len(workers),
        "steps_per_second": 1 / step_seconds,
        "bytes_per_second": sum(server["in_bytes"] + server["out_bytes"] for server in servers) / step_seconds,
        "per_server": servers,
        "busiest_bytes": max(server["in_bytes"] + server["out_bytes"] for server in servers),
        "busiest_cpu_seconds": busiest_seconds,
        "busiest_share": busiest_seconds / step_seconds,
        "servers_cpu_seconds": total(servers),
        "workers_cpu_seconds": total(workers),
        "coordinator_cpu_seconds": (cpu_after - cpu_before) / passed,
        "saved_bytes": sum(g.saved_bytes for update in measured for g in update.gradients) / steps,
        "staleness": sum(update.staleness for update in measured) / len(measured),
        "refused": coordinator.refused,
    }


def _each(before: Mapping[str, float], after: Mapping[str, float], steps: float) -> dict[str, float]:
    return {name: (after[name] - before[name]) / steps for name in after}


def measure_all_reduce(config: Config, folder: Path) -> dict[str, Any]:
    """Train all steps of a config in this process, `WARM_UP` of which do not count; returns a row as `measure` does.

    The bytes are those of the formula: an all-reduce of G bytes between n replicas moves 2(n-1) G in all.
    """
    config, mesh = start(config)
    program = build(config, mesh)
    data = open_data(config, folder)
    steps = config.train.steps - WARM_UP
    state, began, cpu_before = program.init(), 0.0, 0.0
    with Batches(data.train, program.batch_sharding, 0, config.train.steps) as batches:
        for step, batch in enumerate(batches):
            if step == WARM_UP:
                jax.block_until_ready(state)
                began, cpu_before = time.perf_counter(), time.process_time()
            state, _ = program.train_step(state, batch)
    jax.block_until_ready(state)
    step_seconds, cpu_seconds = (time.perf_counter() - began) / steps, (time.process_time() - cpu_before) / steps
    number = jax.ShapeDtypeStruct((), np.int32)
    batch = abstract_batch(config, program)
    _, grads = jax.eval_shape(program.loss_and_grads, program.abstract_state.params, batch, number)
    wire = config.grad_reduce.wire_dtype
    grad_bytes = sum(
        leaf.size * (jax.numpy.dtype(wire).itemsize if wire else leaf.dtype.itemsize) for leaf in jax.tree.leaves(grads)
    )
    return {
        "training": "all_reduce",
        "mode": "sync",
        "servers": 0,
        "workers": config.mesh.data,
        "steps_per_second": 1 / step_seconds,
        "bytes_per_second": 2 * (config.mesh.data - 1) * grad_bytes / step_seconds,
        "workers_cpu_seconds": cpu_seconds,
    }


def train_replicas(config: Config, tokens: Path, *, on_cpu: bool) -> dict[str, Any]:
    """`measure_all_reduce` in a process of its own, where JAX has as many CPU devices as the mesh.

    Args:
        config: resolved.
        tokens: folder of the run's text as tokens.
        on_cpu: although there may be GPUs.

    Raises:
        CheckFailed: it failed, or took too long.
    """
    env = {**os.environ, **({"JAX_PLATFORMS": "cpu"} if on_cpu else {})}
    given = json.dumps({"config": config.model_dump(mode="json"), "tokens": str(tokens)})
    command, limit = [sys.executable, "-m", "jaxpar.bench.parameter_server_measured"], _limit_seconds(config)
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=limit, env=env)
    except subprocess.TimeoutExpired:
        raise _too_slow(config, f"all-reduce with {config.mesh.data} replicas") from None
    if done.returncode:
        raise CheckFailed(f"all-reduce with mesh.data {config.mesh.data} failed:\n{done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)


def _limit_seconds(config: Config) -> float:
    return START_SECONDS + STEP_SECONDS * config.train.steps


def _too_slow(config: Config, case: str) -> CheckFailed:
    return CheckFailed(
        f"{case} did not end within {_limit_seconds(config):.0f} s. Measure fewer --steps, fewer workers, or a smaller "
        f"model."
    )


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(json.dumps(measure_all_reduce(Config.from_dict(given["config"]), Path(given["tokens"]))))
