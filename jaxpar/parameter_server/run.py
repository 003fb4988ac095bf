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
from jaxpar.config import CheckFailed, Config, InputError, Stopped
from jaxpar.console import asked_to_stop, progress, say, stopped, too_many_bad_steps
from jaxpar.data.sources import Data, open_data
from jaxpar.mesh import stay_on_cpu, use_config_dtypes
from jaxpar.parameter_server.actors import Actors, RayActors
from jaxpar.parameter_server.cluster import cluster
from jaxpar.parameter_server.coordinator import Coordinator
from jaxpar.parameter_server.report import report_lines, write_report
from jaxpar.parameter_server.slices import Slices
from jaxpar.parameter_server.step_log import StepLog, in_steps
from jaxpar.parameter_server.together import in_thread, unless
from jaxpar.parameter_server.update import RolledBack
from jaxpar.parameter_server.whole import Whole, parameter_shapes, slices_of
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
        InputError: what a user can put right: data, run folder, Ray. When a batch holds what is not in the vocabulary,
            the state after the step before it is saved, in async mode only if nothing of a later step was made.
        CheckFailed: `train.max_bad_steps` steps in a row were not finite (in async mode those that were begun by then
            are done, too), or processes died faster than they could be replaced.
    """
    run_dir = Path(config.train.run_dir)
    run_folder.prepare(config, run_dir, accept_changes)
    with run_folder.locked(run_dir):
        stay_on_cpu()
        use_config_dtypes(config)
        slices_of(config, parameter_shapes(config, make_model))  # refuses more servers than there are arrays
        # Ray starts before any device of JAX, whose threads would not survive Ray's forks. JAX warns of that.
        with cluster(config.parameter_server.ray_address):
            data = open_data(config, run_dir / "tokens")  # which writes, so when all that is quick to check is right
            make_actors = lambda config, slices, folder: RayActors(config, slices, folder, run_dir, make_model, worker)
            return train_with(config, Whole(config, make_model), data, make_actors)


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
        if resumed is None:
            state = whole.program.init()
        else:
            state = checkpoints.restore(whole.program.saved_state)[0].tried_anew(config.train.max_bad_steps)
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
        self.log = StepLog(config, bar, first, whole.program.facts.flops_per_token)
        self.refused: InputError | None = None
        self.events = (folder / "events.jsonl").open("a", encoding="utf-8")

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.log.close()
        self.events.close()

    async def whole_run(self, actors: Actors, state: Any, signals: Sequence[int]) -> dict[str, Any]:
        """Start all processes, train, and end them."""
        before = int(state.skipped), int(state.skipped_in_a_row)
        take = lambda step, updates: self.log.take(step, updates, coordinator.version, coordinator.pool.live)
        self.coordinator = coordinator = Coordinator(self.config, actors, self.done, before, self.report, take)
        try:
            if self.done < self.config.train.steps:
                await unless(self._work(state, signals), self._watch(actors))
        finally:
            await self.coordinator.close()
        return self.log.last

    async def _work(self, state: Any, signals: Sequence[int]) -> None:
        began = time.monotonic()
        ready = await self.coordinator.start(self.whole.parts(state))
        del state
        self.log.start_clock(ready)
        seconds, processes = time.monotonic() - began, [worker.process for worker in ready]
        ready_ones = f"{len(processes)} workers are" if len(processes) > 1 else "1 worker is"
        text = f"{ready_ones} ready after {seconds:.1f} s"
        self.report("started", text, seconds=seconds, processes=processes)
        first, stop = self.done + 1, None
        try:
            await self._loop(signals)
        except Stopped as asked:
            stop = asked
        if self.done >= first:
            busy = await self.coordinator.busy_seconds()
            for line in write_report(self.folder, (first, self.done), self.coordinator, busy, self.log.totals):
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
        ended = lambda: bool(signals) or self.log.bad >= train.max_bad_steps
        first = settled = self.done  # what is due after this step is done, too
        while settled < train.steps:
            try:
                if self.done == settled:
                    await self._steps(ended)
                stopping = ended() or self.refused is not None
                if self.refused is None or (self.done > first and self.coordinator.between_steps):
                    await self._settle(stopping)
            except RolledBack as back:
                if self.done == settled or back.step < self.done:
                    settled = self.done = back.step
                    self.log.go_back(settled)
                continue  # where no step was lost, with what is due
            settled = self.done
            if stopping:
                self._stop(signals)

    async def _steps(self, ended: Callable[[], bool]) -> None:
        """Make the steps up to the next pause, or up to a batch that a worker refuses."""
        try:
            self.done = await self.coordinator.steps(self.done, self._next_pause(), ended)
        except InputError as error:
            self.done, self.refused = self.coordinator.reported, error

    def _next_pause(self) -> int:
        """The next step after which something is due."""
        train = self.config.train
        everies = (train.eval_every, self.config.checkpoint.every)
        return min([train.steps, *((self.done // every + 1) * every for every in everies if every)])

    async def _settle(self, stopping: bool) -> None:
        """Do what is due after a step."""
        due = lambda every: self.done == self.config.train.steps or bool(every and self.done % every == 0)
        if self.log.unevaluated and self.data.validation and due(self.config.train.eval_every):
            await self._evaluate(len(self.data.validation))
        if stopping or due(self.config.checkpoint.every):
            self.log.write()  # no checkpoint is ahead of metrics.jsonl
            await self._save()
        self.log.write()

    def _stop(self, signals: Sequence[int]) -> None:
        """End the run after a step that is saved."""
        train = self.config.train
        self.checkpoints.wait()
        if self.refused:
            latest = self.checkpoints.latest_step()
            saved = f"The state after step {latest} is saved; the same command goes on from there."
            raise InputError(f"a batch was refused: {self.refused} {'Nothing was saved.' if latest is None else saved}")
        if self.log.bad >= train.max_bad_steps:
            saved = f"{self.checkpoints.folder}/{self.done}"
            raise CheckFailed(too_many_bad_steps(self.log.bad, train.max_bad_steps, saved))
        if self.done < train.steps:
            say(self.bar.console, stopped(signals[0], self.done))
            raise Stopped(128 + signals[0])

    async def _evaluate(self, batches: int) -> None:
        began = time.monotonic()
        loss, tokens = await self.coordinator.evaluate(batches)
        self.log.evaluated(loss / tokens, time.monotonic() - began)

    async def _save(self) -> None:
        began = time.monotonic()
        await self.coordinator.snapshot()  # no way back goes behind a checkpoint
        parts = await self.coordinator.state()
        latest, per_step = self.coordinator.latest, self.coordinator.per_step
        skipped = latest.skipped // per_step, in_steps(latest.skipped_in_a_row, per_step)
        state = self.whole.state(parts, self.done, *skipped)
        self.checkpoints.save(self.done, state, config_yaml=self.config.to_yaml(), data_position=self.done)
        self.log.clock.leave_out(time.monotonic() - began)

    def report(self, event: str, text: str, **numbers: Any) -> None:
        """Tell people, and the run's `events.jsonl`."""
        say(self.bar.console, text)
        line = {"event": event, "time": time.time(), "step": self.coordinator.reported, "text": text, **numbers}
        self.events.write(json.dumps(line) + "\n")
        self.events.flush()


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, also where an event loop runs already, as in notebooks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
