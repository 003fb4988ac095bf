"""A whole run with parameter servers: the same run folder, metrics and checkpoints as any other.

Besides what every run folder holds there is `parameter_server/`: `events.jsonl` (who died, who came back, how long it
took), `server-<i>.jsonl` (every update that a server made), `report.json` (staleness, bytes), and while the run goes on
the servers' snapshots. All processes need it on a file system in common.
"""

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.filesize import decimal

from jaxpar import run_folder
from jaxpar.checkpoint import Checkpoints
from jaxpar.config import CheckFailed, Config, MeshConfig, ParallelConfig
from jaxpar.console import asked_to_stop, progress, say, show_step, stopped, too_many_bad_steps
from jaxpar.data.sources import Data, open_data
from jaxpar.flops import flops_per_token
from jaxpar.mesh import make_mesh, stay_on_cpu, use_config_dtypes
from jaxpar.metrics import MetricsWriter, StepClock, peak_memory_bytes
from jaxpar.names import Named, like, named
from jaxpar.optimizer import make_schedule
from jaxpar.parameter_server.actors import Actors, RayActors
from jaxpar.parameter_server.cluster import cluster
from jaxpar.parameter_server.coordinator import Coordinator, RolledBack, Update
from jaxpar.parameter_server.slices import Slices, assemble, cut, nbytes, take, take_state
from jaxpar.parameter_server.worker import Ready, Worker
from jaxpar.start_report import run_report
from jaxpar.step import MakeModel, Program, build

FOLDER = "parameter_server"
MakeActors = Callable[[Config, Sequence[Slices], Path], Actors]


def train(
    config: Config,
    *,
    accept_changes: bool = False,
    make_model: MakeModel | None = None,
    worker: type[Worker] = Worker,
) -> dict[str, Any]:
    """Train a config with parameter servers to its last step, going on from the newest checkpoint in its run folder.

    This process keeps to the CPU: it hands out work, and holds the whole state only to save it.

    Args:
        config: with all axes of the mesh known; the mesh is that of each worker.
        accept_changes: go on although the run folder was made by a config that differs where it matters.
        make_model: builds the model, a `LanguageModel`; by default the config's own.
        worker: the class of the workers.

    Returns:
        The metrics of the last step.

    Raises:
        InputError: what a user can put right: data, run folder, Ray.
        CheckFailed: steps were not finite, or processes died faster than they could be replaced.
    """
    run_dir = Path(config.train.run_dir)
    run_folder.prepare(config, run_dir, accept_changes)
    data = open_data(config, run_dir / "tokens")
    with cluster(config.parameter_server.ray_address):
        make_actors = lambda config, slices, folder: RayActors(config, slices, folder, run_dir, make_model, worker)
        return train_with(config, data, make_actors, make_model)


def train_with(
    config: Config, data: Data, make_actors: MakeActors, make_model: MakeModel | None = None
) -> dict[str, Any]:
    """What `train` does, with whatever runs servers and workers.

    Args:
        config: see `train`.
        data: the run's.
        make_actors: from the config, each server's slices and the folder for their files.
        make_model: see `train`.
    """
    stay_on_cpu()
    use_config_dtypes(config)
    run_dir = Path(config.train.run_dir)
    console = Console()
    with ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(run_dir / "checkpoints", config.checkpoint.keep))
        whole = Whole(config, make_model)
        resumed = checkpoints.latest_step()
        for line in report_lines(config, whole, data, resumed):
            say(console, line)
        state = whole.program.init() if resumed is None else checkpoints.restore(whole.program.saved_state)[0]
        run_folder.write_config(config, run_dir)
        run_folder.add_start_report(list(report_lines(config, whole, data, resumed)), run_dir)
        bar = stack.enter_context(progress(console))
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        shutil.rmtree(folder / "snapshots", ignore_errors=True)
        run = stack.enter_context(Run(config, whole, data, checkpoints, bar, folder, int(state.step)))
        with asked_to_stop() as signals:
            actors = make_actors(config, whole.slices, folder)
            last = _run(run.whole_run(actors, jax.device_get(state), signals))
        checkpoints.wait()
        shutil.rmtree(folder / "snapshots", ignore_errors=True)
    say(console, f"done: {run_dir} holds metrics.jsonl and checkpoints/{checkpoints.latest_step()}")
    return last


class Whole:
    """The whole state of a run, by name, and how it is cut over servers.

    Args:
        config: of the run.
        make_model: builds the model.

    Attributes:
        program: of the run on one device, for shapes and initial values.
        slices: what each server owns.
    """

    def __init__(self, config: Config, make_model: MakeModel | None = None) -> None:
        alone = {"mesh": MeshConfig(devices=1), "parallel": ParallelConfig()}
        mesh = make_mesh(devices=jax.devices("cpu")[:1])
        self.program: Program = build(config.of_one_worker().model_copy(update=alone), mesh, make_model)
        self.params: Named = named(self.program.saved_state.params)
        self.opt_state: Named = named(self.program.saved_state.opt_state)
        servers = config.parameter_server.servers
        self.slices = cut(self.params, servers, by_rows=config.optimizer.name != "adafactor")
        self._per_step = config.workers if config.parameter_server.mode == "async" else 1

    def parts(self, state: Any) -> list[tuple[Named, Named]]:
        """Each server's parameters and optimizer state."""
        params, opt_state = named(state.params), self._counted(named(state.opt_state), self._per_step)
        return [(take(params, slices), take_state(opt_state, self.params, slices)) for slices in self.slices]

    def state(self, parts: Sequence[tuple[Named, Named]], step: int, skipped: int, in_a_row: int) -> Any:
        """The state of which servers have these parts, as checkpoints hold it."""
        saved, counter = self.program.saved_state, lambda number: np.asarray(number, np.int32)
        params, opt_state = (
            assemble(shapes, self.params, list(zip(self.slices, kind, strict=True)))
            for shapes, kind in zip((self.params, self.opt_state), zip(*parts, strict=True), strict=True)
        )
        return saved._replace(
            step=counter(step),
            params=like(saved.params, params),
            opt_state=like(saved.opt_state, self._counted(opt_state, 1 / self._per_step)),
            skipped=counter(skipped),
            skipped_in_a_row=counter(in_a_row),
        )

    def _counted(self, opt_state: Named, factor: float) -> Named:
        """Counters of updates turned into counters of steps, or back: in async mode a step is several updates."""
        count = lambda name, leaf: np.issubdtype(leaf.dtype, np.integer) and name.endswith("count")
        turned = lambda leaf: (np.asarray(leaf) * factor).astype(leaf.dtype)
        return {name: turned(leaf) if count(name, leaf) else leaf for name, leaf in opt_state.items()}


class Run:
    """A run's sinks, and its loop.

    Args:
        config: of the run.
        whole: its state's shapes.
        data: what it reads.
        checkpoints: its checkpoints.
        bar: its progress bar.
        folder: for what only such runs have.
        first: steps done before.
    """

    def __init__(
        self, config: Config, whole: Whole, data: Data, checkpoints: Checkpoints, bar: Any, folder: Path, first: int
    ) -> None:
        self.config, self.whole, self.data, self.checkpoints, self.bar = config, whole, data, checkpoints, bar
        self.folder, self.done = folder, first
        self.writer = self._open_metrics()
        self.schedule = make_schedule(config.optimizer)
        self.task = bar.add_task("starting workers", completed=first, total=config.train.steps, loss="")
        self.last: dict[str, Any] = {}
        self.bad = 0
        self.totals = {"pulled_bytes": 0, "pushed_bytes": 0, "saved_bytes": 0}
        self.events = (folder / "events.jsonl").open("a", encoding="utf-8")

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()
        self.events.close()

    async def whole_run(self, actors: Actors, state: Any, signals: Sequence[int]) -> dict[str, Any]:
        """Start all processes, train, and end them."""
        self.coordinator = Coordinator(
            self.config, actors, self.done, int(state.skipped), self.report, lambda *step: self._on_step(*step)
        )
        try:
            if self.done < self.config.train.steps:
                began = time.monotonic()
                ready: list[Ready] = await self.coordinator.start(self.whole.parts(state))
                del state
                self._start_clock(ready)
                seconds = time.monotonic() - began
                self.report("started", f"{len(ready)} workers are ready after {seconds:.1f} s", seconds=seconds)
                await self._loop(signals)
                self._write_report(await self.coordinator.busy_seconds())
        finally:
            await self.coordinator.close()
        return self.last

    async def _loop(self, signals: Sequence[int]) -> None:
        train, checkpoint = self.config.train, self.config.checkpoint
        evaluating = self.data.validation
        while self.done < train.steps:
            try:
                pauses = (_next(self.done, every) for every in (train.eval_every, checkpoint.every) if every)
                ended = lambda: bool(signals) or self.bad >= train.max_bad_steps
                self.done = await self.coordinator.steps(self.done, min([train.steps, *pauses]), ended)
                due = lambda every: self.done == train.steps or bool(every and self.done % every == 0)
                if evaluating and due(train.eval_every):
                    await self._evaluate(len(evaluating))
                if ended() or due(checkpoint.every):
                    await self._save()
            except RolledBack as back:
                self.done = back.step
                self.bad = 0
                self.writer.close()
                self.writer = self._open_metrics()
                continue
            self._write_pending()
            if self.bad >= train.max_bad_steps:
                self.checkpoints.wait()
                saved = f"{self.checkpoints.folder}/{self.done}"
                raise CheckFailed(too_many_bad_steps(self.bad, train.max_bad_steps, saved))
            if signals and self.done < train.steps:
                self.checkpoints.wait()
                say(self.bar.console, stopped(signals[0], self.done))
                raise SystemExit(128 + signals[0])

    def _on_step(self, step: int, updates: Sequence[Update]) -> None:
        """Take in the numbers of a step; they are written with the next, or with an evaluation that follows."""
        self._write_pending()
        gradients = [g for update in updates for g in update.gradients]
        tokens = sum(g.tokens for g in gradients)
        last = updates[-1]
        per_step = self.coordinator.per_step
        sent = {name: sum(getattr(g, name) for g in gradients) for name in self.totals}
        self.totals = {name: total + sent[name] for name, total in self.totals.items()}
        batch_tokens = self.config.train.global_batch * self.config.data.sequence_length
        self.bad = -(-last.skipped_in_a_row // per_step)
        self.last = {
            "step": step,
            "loss": sum(g.loss * g.tokens for g in gradients) / max(tokens, 1),
            "grad_norm": sum(update.grad_norm for update in updates) / len(updates),
            "learning_rate": float(self.schedule(step - 1 - (last.skipped - (last.skipped_in_a_row > 0)) // per_step)),
            "tokens": tokens,
            "skipped": last.skipped // per_step,
            "skipped_in_a_row": self.bad,
            "tokens_per_second": None,
            "step_seconds": None,
            **self.clock.read(step, step * batch_tokens, time.monotonic()),
            "peak_memory_bytes": peak_memory_bytes(),
            "workers": self.coordinator.pool.live,
            "staleness": sum(update.staleness for update in updates) / len(updates),
            **sent,
        }
        self.pending = True

    pending = False

    def _write_pending(self) -> None:
        if not self.pending:
            return
        self.pending = False
        step, train = self.last["step"], self.config.train
        if step % self.config.log.every == 0 or step == train.steps or self.bad or "validation_loss" in self.last:
            self.writer.write(step, {name: value for name, value in self.last.items() if name != "step"})
        show_step(self.bar, self.task, step, train.steps, self.last)

    async def _evaluate(self, batches: int) -> None:
        began = time.monotonic()
        loss, tokens = await self.coordinator.evaluate(batches)
        seconds = time.monotonic() - began
        self.last |= {"validation_loss": loss / tokens, "evaluation_seconds": seconds}
        self.clock.leave_out(seconds)

    async def _save(self) -> None:
        began = time.monotonic()
        await self.coordinator.snapshot()  # no way back goes behind a checkpoint
        parts = await self.coordinator.state()
        skipped = self.last["skipped"], self.last["skipped_in_a_row"]
        state = self.whole.state(parts, self.done, *skipped)
        self.checkpoints.save(self.done, state, config_yaml=self.config.to_yaml(), data_position=self.done)
        self.clock.leave_out(time.monotonic() - began)

    def report(self, event: str, text: str, **numbers: Any) -> None:
        """Tell people, and the run's `events.jsonl`."""
        say(self.bar.console, text)
        line = {"event": event, "time": time.time(), "step": self.done, "text": text, **numbers}
        self.events.write(json.dumps(line) + "\n")
        self.events.flush()

    def _start_clock(self, ready: Sequence[Ready]) -> None:
        config = ready[0].config
        per_token = flops_per_token(config.model, config.data.sequence_length)
        devices = len(ready) * config.mesh.data * config.mesh.pipe * config.mesh.tensor
        self.clock = StepClock(per_token, ready[0].peak_flops_per_second, devices)

    def _open_metrics(self) -> MetricsWriter:
        self.pending = False
        return MetricsWriter(Path(self.config.train.run_dir), self.config.log.tensorboard, self.done)

    def _write_report(self, busy_seconds: Sequence[float]) -> None:
        """Write `report.json`, and in async mode print how stale gradients were."""
        c = self.coordinator
        staleness = {str(stale): count for stale, count in sorted(c.staleness.items()) if count}
        report = {"staleness": staleness, "refused": c.refused, "busy_seconds": list(busy_seconds), **self.totals}
        (self.folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        say(self.bar.console, _traffic(self.totals))
        if self.config.parameter_server.mode == "async":
            for line in _histogram(c.staleness, c.refused):
                say(self.bar.console, line)


def report_lines(config: Config, whole: Whole, data: Data, resumed: int | None) -> list[str]:
    """What a person wants to know before the first step, a line each."""
    settings, mesh = config.parameter_server, config.mesh
    held = [sum(nbytes(rows) for rows in take(_ones(whole.params), s).values()) for s in whole.slices]
    sizes = ", ".join(decimal(size) for size in held)
    axes = f"data {mesh.data} × pipe {mesh.pipe} × tensor {mesh.tensor}"
    several = "s" * (settings.workers > 1)
    where = settings.ray_address or "this machine"
    return [
        f"parameter servers: {settings.servers} on {where}, which hold {sizes} of parameters, {settings.mode}",
        f"workers: {settings.workers} worker{several}, each on a mesh {axes}; at least {settings.min_workers} to go on",
        f"batch: {config.batch_derivation()}",
        *run_report(config, data, "cpu", resumed),
    ]


def _ones(shapes: Mapping[str, Any]) -> Named:
    """Arrays of these shapes that take no memory."""
    return {name: np.broadcast_to(np.zeros((), shape.dtype), shape.shape) for name, shape in shapes.items()}


def _traffic(totals: Mapping[str, int]) -> str:
    pulled, pushed, saved = (decimal(totals[name]) for name in ("pulled_bytes", "pushed_bytes", "saved_bytes"))
    return f"workers pulled {pulled} of parameters and pushed {pushed} of gradients; rows of zeros saved {saved}"


def _histogram(staleness: Mapping[int, int], refused: int) -> list[str]:
    """How many updates were how stale, as bars."""
    most = max([*staleness.values(), 1])
    bars = [f"  {stale:3d}  {'█' * round(40 * n / most):40}  {n}" for stale, n in sorted(staleness.items()) if n]
    return ["staleness of updates, in versions:", *bars, f"  {refused} gradients were refused as too stale"]


def _next(done: int, every: int) -> int:
    """The next multiple."""
    return (done // every + 1) * every


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, also where an event loop runs already, as in notebooks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
