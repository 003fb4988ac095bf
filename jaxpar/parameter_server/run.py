"""A whole run with parameter servers: the same run folder, metrics and checkpoints as any other.

Besides what every run folder holds there is `parameter_server/`: `events.jsonl` (who died, who came back, how long it
took), `server-<i>.jsonl` (every update that a server made), `report.json` (staleness, bytes), and while the run goes on
the servers' snapshots. All processes need it on a file system in common.
"""

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxpar import run_folder
from jaxpar.checkpoint import Checkpoints
from jaxpar.config import CheckFailed, Config, Stopped
from jaxpar.console import asked_to_stop, progress, say, show_step, stopped, too_many_bad_steps
from jaxpar.data.sources import Data, open_data
from jaxpar.flops import flops_per_token
from jaxpar.mesh import stay_on_cpu, use_config_dtypes
from jaxpar.metrics import MetricsWriter, StepClock, peak_memory_bytes
from jaxpar.optimizer import make_schedule
from jaxpar.parameter_server.actors import Actors, RayActors
from jaxpar.parameter_server.cluster import cluster
from jaxpar.parameter_server.coordinator import Coordinator
from jaxpar.parameter_server.report import report_lines, write_report
from jaxpar.parameter_server.slices import Slices
from jaxpar.parameter_server.together import in_thread, unless
from jaxpar.parameter_server.update import RolledBack, Update
from jaxpar.parameter_server.whole import Whole
from jaxpar.parameter_server.worker import Worker
from jaxpar.step import MakeModel

FOLDER = "parameter_server"
WATCH_SECONDS = 5.0
"""Between two looks whether Ray is alive."""
ANSWER_SECONDS = 60.0
"""How long it may take to say so."""
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
    stay_on_cpu()
    use_config_dtypes(config)
    whole = Whole(config, make_model)
    with cluster(config.parameter_server.ray_address):
        make_actors = lambda config, slices, folder: RayActors(config, slices, folder, run_dir, make_model, worker)
        return train_with(config, whole, data, make_actors)


def train_with(config: Config, whole: Whole, data: Data, make_actors: MakeActors) -> dict[str, Any]:
    """What `train` does, with whatever runs servers and workers.

    Args:
        config: see `train`.
        whole: its state's shapes.
        data: the run's.
        make_actors: from the config, each server's slices and the folder for their files.
    """
    run_dir = Path(config.train.run_dir)
    console = Console()
    with ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(run_dir / "checkpoints", config.checkpoint.keep))
        resumed = checkpoints.latest_step()
        report = report_lines(config, whole, data, resumed)
        for line in report:
            say(console, line)
        state = whole.program.init() if resumed is None else checkpoints.restore(whole.program.saved_state)[0]
        run_folder.write_config(config, run_dir)
        run_folder.add_start_report(report, run_dir)
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
        self.pending = False  # of the last numbers, whether they are still to be written
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
        before = int(state.skipped), int(state.skipped_in_a_row)
        on_step = lambda *step: self._on_step(*step)
        self.coordinator = Coordinator(self.config, actors, self.done, before, self.report, on_step)
        try:
            if self.done < self.config.train.steps:
                await unless(self._work(state, signals), self._watch(actors))
        finally:
            await self.coordinator.close()
        return self.last

    async def _work(self, state: Any, signals: Sequence[int]) -> None:
        began = time.monotonic()
        self.ready = await self.coordinator.start(self.whole.parts(state))
        del state
        self._start_clock()
        seconds, processes = time.monotonic() - began, [ready.process for ready in self.ready]
        text = f"{len(processes)} workers are ready after {seconds:.1f} s"
        self.report("started", text, seconds=seconds, processes=processes)
        first, stop = self.done + 1, None
        try:
            await self._loop(signals)
        except Stopped as asked:
            stop = asked
        busy = await self.coordinator.busy_seconds()
        for line in write_report(self.folder, (first, self.done), self.coordinator, busy, self.totals):
            say(self.bar.console, line)
        if stop:
            raise stop

    async def _watch(self, actors: Actors) -> None:
        """See that Ray itself is alive, without which nothing would ever answer or be replaced.

        Raises:
            CheckFailed: it is not.
        """
        alive = True
        while alive:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    alive = await in_thread(actors.alive)
            except Exception:
                alive = False
        latest = self.checkpoints.latest_step()
        raise CheckFailed(
            "Ray itself died on this machine, and with it all servers and workers. The same command starts it anew and "
            + ("begins again." if latest is None else f"goes on from the checkpoint of step {latest}.")
        )

    async def _loop(self, signals: Sequence[int]) -> None:
        train = self.config.train
        ended = lambda: bool(signals) or self.bad >= train.max_bad_steps
        settled = self.done  # what is due after this step is done, too
        while settled < train.steps:
            try:
                if self.done == settled:
                    self.done = await self.coordinator.steps(self.done, self._next_pause(), ended)
                stopping = ended()
                await self._settle(stopping)
            except RolledBack as back:
                if self.done == settled or back.step < self.done:
                    self._go_back(back.step)
                    settled = self.done
                continue  # where no step was lost, with what is due
            settled = self.done
            if stopping:
                self._stop(signals)

    def _next_pause(self) -> int:
        """The next step after which something is due."""
        train = self.config.train
        everies = (train.eval_every, self.config.checkpoint.every)
        return min([train.steps, *((self.done // every + 1) * every for every in everies if every)])

    async def _settle(self, stopping: bool) -> None:
        """Do what is due after a step."""
        due = lambda every: self.done == self.config.train.steps or bool(every and self.done % every == 0)
        new = self.last and "validation_loss" not in self.last
        if new and self.data.validation and due(self.config.train.eval_every):
            await self._evaluate(len(self.data.validation))
        if stopping or due(self.config.checkpoint.every):
            self._write_pending()  # no checkpoint is ahead of metrics.jsonl
            await self._save()
        self._write_pending()

    def _go_back(self, step: int) -> None:
        """Take back what was noted of steps after this one."""
        self.done, self.bad = step, 0
        if self.last and self.last["step"] <= step:
            self._write_pending()
        else:
            self.last, self.pending = {}, False
        self.writer.close()
        self.writer = self._open_metrics()
        self._start_clock()

    def _stop(self, signals: Sequence[int]) -> None:
        """End the run after a step that is saved."""
        train = self.config.train
        self.checkpoints.wait()
        if self.bad >= train.max_bad_steps:
            saved = f"{self.checkpoints.folder}/{self.done}"
            raise CheckFailed(too_many_bad_steps(self.bad, train.max_bad_steps, saved))
        if self.done < train.steps:
            say(self.bar.console, stopped(signals[0], self.done))
            raise Stopped(128 + signals[0])

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
        self.bad = _steps(last.skipped_in_a_row, per_step)
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
            **sent,
        }
        if self.config.parameter_server.mode == "async":
            self.last["staleness"] = sum(update.staleness for update in updates) / len(updates)
        self.pending = True

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
        latest, per_step = self.coordinator.latest, self.coordinator.per_step
        skipped = latest.skipped // per_step, _steps(latest.skipped_in_a_row, per_step)
        state = self.whole.state(parts, self.done, *skipped)
        self.checkpoints.save(self.done, state, config_yaml=self.config.to_yaml(), data_position=self.done)
        self.clock.leave_out(time.monotonic() - began)

    def report(self, event: str, text: str, **numbers: Any) -> None:
        """Tell people, and the run's `events.jsonl`."""
        say(self.bar.console, text)
        line = {"event": event, "time": time.time(), "step": self.coordinator.reported, "text": text, **numbers}
        self.events.write(json.dumps(line) + "\n")
        self.events.flush()

    def _start_clock(self) -> None:
        config = self.ready[0].config
        per_token = flops_per_token(config.model, config.data.sequence_length)
        devices = len(self.ready) * config.mesh.data * config.mesh.pipe * config.mesh.tensor
        self.clock = StepClock(per_token, self.ready[0].peak_flops_per_second, devices)

    def _open_metrics(self) -> MetricsWriter:
        return MetricsWriter(Path(self.config.train.run_dir), self.config.log.tensorboard, self.done)


def _steps(updates: int, per_step: int) -> int:
    """Updates in steps, a begun one counted whole."""
    return -(-updates // per_step)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, also where an event loop runs already, as in notebooks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
