"""The training loop behind `jaxpar train`: start or continue a run, step, evaluate, report, checkpoint.

A run folder holds `config.yaml` (resolved), `metrics.jsonl`, `checkpoints/`, and `tokens/` (text made into tokens).
The loop never waits for the step it has just started: it reads the metrics of the step before.
"""

import math
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import Progress

from jaxpar import run_folder
from jaxpar.checkpoint import Checkpoints
from jaxpar.config import CheckFailed, Config, InputError, Stopped
from jaxpar.console import asked_to_stop, progress, say, show_step, stopped, too_many_bad_steps
from jaxpar.data.batches import Batches
from jaxpar.data.examples import EvaluationExamples
from jaxpar.data.sources import Data, open_data
from jaxpar.drift import DriftCheck, message
from jaxpar.flops import peak_flops_per_second
from jaxpar.metrics import MetricsWriter, StepClock, peak_memory_bytes
from jaxpar.start_report import start_report
from jaxpar.step import MakeModel, Program, TrainState, build


def train(
    config: Config, mesh: Mesh, *, accept_changes: bool = False, make_model: MakeModel | None = None
) -> dict[str, Any]:
    """Train a config to its last step, going on from the newest checkpoint in its run folder.

    Args:
        config: resolved.
        mesh: its mesh.
        accept_changes: go on although the run folder was made by a config that differs where it matters.
        make_model: builds the model, a `LanguageModel`; by default the config's own.

    Returns:
        The metrics of the last step.

    Raises:
        InputError: what a user can put right: data, run folder, full disk. When a batch holds what is not in the
            vocabulary, the state after the step before it is saved.
        CheckFailed: after `train.max_bad_steps` steps in a row whose loss or gradient was not finite; or when copies of
            the state that should be equal were not, and were not to be or could not be repaired.
    """
    if config.train.data_parallel == "parameter_server":
        raise InputError(
            "train.data_parallel parameter_server: call jaxpar.parameter_server.run.train(config) instead."
        )
    run_dir = Path(config.train.run_dir)
    run_folder.prepare(config, run_dir, accept_changes)
    main = jax.process_index() == 0
    console = Console(quiet=not main)
    with ExitStack() as stack:
        if main:
            stack.enter_context(run_folder.locked(run_dir))
        data = open_data(config, run_dir / "tokens")
        program = build(config, mesh, make_model)
        checkpoints = stack.enter_context(Checkpoints(run_dir / "checkpoints", config.checkpoint.keep))
        resumed = checkpoints.latest_step()
        first = resumed or 0
        drift = DriftCheck(mesh, program.abstract_state, first) if config.train.drift_check_every else None
        report = list(start_report(config, program, data, drift, resumed))
        for line in report:
            say(console, line)
        if resumed is None:
            state = program.init()
        else:
            saved: TrainState = checkpoints.restore(program.saved_state)[0]
            state = program.from_saved(saved.tried_anew(config.train.max_bad_steps))
        if main:
            run_folder.write_config(config, run_dir)
            run_folder.add_start_report(report, run_dir)
        writer = stack.enter_context(
            MetricsWriter(run_dir, config.log.tensorboard, first, process_index=jax.process_index())
        )
        batches = stack.enter_context(
            Batches(data.train, program.batch_sharding, first, max(first, config.train.steps))
        )
        bar = stack.enter_context(progress(console))
        run = Run(config, program, data, checkpoints, writer, bar, first, drift)
        with asked_to_stop() as signals:
            last = run.steps(state, batches, first, signals)
        checkpoints.wait()
    say(console, f"done: {run_dir} holds metrics.jsonl and checkpoints/{checkpoints.latest_step()}")
    return last


NO_RATES = {"tokens_per_second": None, "step_seconds": None}
"""Of the first step after a start, which is when compilation happens."""
NOTHING: Mapping[str, float] = {}


class Run:
    """The state of a loop that is not the model's: sinks, clock, and the metrics not yet read."""

    def __init__(
        self,
        config: Config,
        program: Program,
        data: Data,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        bar: Progress,
        first: int,
        drift: DriftCheck | None = None,
    ) -> None:
        self.config, self.program, self.data, self.drift = config, program, data, drift
        self.checkpoints, self.writer, self.bar = checkpoints, writer, bar
        device = program.mesh.devices.flat[0]
        self.clock = StepClock(
            program.facts.flops_per_token,
            peak_flops_per_second(device.device_kind, config.train.compute_dtype),
            program.mesh.size,
        )
        self.task = bar.add_task("compiling", completed=first, total=config.train.steps, loss="")
        self.last: dict[str, Any] = {}
        self.first = first
        self.refused: InputError | None = None

    def steps(self, state: TrainState, batches: Batches, first: int, signals: list[int]) -> dict[str, Any]:
        """Run the steps after `first`; returns the last metrics.

        Raises:
            Stopped: with 128 + the signal's number, after the step during which a signal came, which is saved.
            CheckFailed: after too many steps in a row that were not applied, or when copies drifted.
            InputError: a batch cannot be had; the step before it is saved.
        """
        train = self.config.train
        pending: tuple[int, dict[str, jax.Array]] | None = None
        for step in range(first + 1, train.steps + 1):
            state, metrics = self.program.train_step(state, self._next(batches))
            if pending:
                self._report(*pending, state)
            pending = step, metrics
            stop = _stop_signal(signals, step)
            evaluating = self.data.validation if self._due(step, train.eval_every) else None
            saving = stop or self._due(step, self.config.checkpoint.every)
            if train.drift_check_every and (saving or step % train.drift_check_every == 0):
                state = self._without_drift(step, state, metrics)  # no checkpoint is of an unchecked state
            if evaluating or saving:
                # These wait for the step anyway, and no checkpoint may be ahead of metrics.jsonl.
                validation = evaluate(self.program, state.params, evaluating) if evaluating else {}
                self.clock.leave_out(validation.get("evaluation_seconds", 0))
                self._report(step, metrics, state, validation)
                pending = None
            if saving:
                self._save(step, state)
            if stop:
                self.checkpoints.wait()
                say(self.bar.console, stopped(stop, step))
                raise Stopped(128 + stop)
        return self.last

    def _next(self, batches: Batches) -> dict[str, jax.Array]:
        """The next batch; when this process cannot have it, one by which the step tells all that it was refused."""
        if self.refused is None:
            try:
                return next(batches)
            except InputError as error:
                self.refused = error
        return batches.refusal()

    def _report(
        self, step: int, metrics: dict[str, jax.Array], state: TrainState, validation: Mapping[str, float] = NOTHING
    ) -> None:
        """Read the metrics of a step, which waits for it, pass them on, and end the run if that is what they say.

        The state is that after the step: one more that was begun in the meantime changes nothing where the run ends
        (see `jaxpar.step.make_train_step`).

        Raises:
            CheckFailed: it is one too many in a row that was not applied; the state is saved.
            InputError: its batch was refused; the state, of the step before, is saved.
        """
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        train = self.config.train
        if math.isnan(values["tokens"]):
            why = self.refused or "it holds what another process of this run refuses, whose error says more."
            raise InputError(f"the batch of step {step} was refused: {why} {self._saved(step - 1, state)}")
        rates = self.clock.read(step, step * train.global_batch * self.config.data.sequence_length, time.monotonic())
        memory = {"peak_memory_bytes": peak_memory_bytes()}
        self.last = {"step": step, **values, **NO_RATES, **rates, **memory, **validation}
        bad = values["skipped_in_a_row"]
        if step % self.config.log.every == 0 or step == train.steps or bad or validation:
            self.writer.write(step, {name: value for name, value in self.last.items() if name != "step"})
        show_step(self.bar, self.task, step, train.steps, self.last)
        if bad >= train.max_bad_steps:
            self._saved(step, state)
            raise CheckFailed(too_many_bad_steps(bad, train.max_bad_steps, f"{self.checkpoints.folder}/{step}"))

    def _saved(self, step: int, state: TrainState) -> str:
        """Save the state after a step, with which the run ends, and say so."""
        if step == self.first:  # it was saved before, or is that of a run not begun
            return "Nothing was trained."
        if self.drift:
            state = self._without_drift(step, state)
        self._save(step, state)
        self.checkpoints.wait()
        return f"The state after step {step} is saved; the same command goes on from there."

    def _without_drift(self, step: int, state: TrainState, metrics: dict[str, jax.Array] | None = None) -> TrainState:
        """The state, with all its copies equal: a check, which waits for the step, and what the config wants done.

        `metrics` are those of the step, if they are still to be reported.
        """
        assert self.drift
        drifts = self.drift.check(state, step)
        if not drifts:
            return state
        said = message(drifts, self.drift.mesh)
        if self.config.train.drift_action == "stop" or any(drift.good is None for drift in drifts):
            if metrics:
                self._report(step, metrics, state)
            self.checkpoints.wait()
            latest = self.checkpoints.latest_step()
            saved = "there is no checkpoint yet" if latest is None else f"the newest checkpoint is of step {latest}"
            raise CheckFailed(f"{said}\nThis state is not saved; {saved}.")
        say(self.bar.console, f"{said}\nThe majority's copies were given to the others.")
        return self.drift.resynchronise(state, drifts)

    def _due(self, step: int, every: int | None) -> bool:
        return step == self.config.train.steps or bool(every and step % every == 0)

    def _save(self, step: int, state: TrainState) -> None:
        start = time.monotonic()
        self.checkpoints.save(step, self.program.to_saved(state), config_yaml=self.config.to_yaml(), data_position=step)
        self.clock.leave_out(time.monotonic() - start)


def evaluate(program: Program, params: Any, validation: EvaluationExamples) -> dict[str, float]:
    """Mean loss over the unmasked tokens of the validation batches, and how long it took.

    Returns:
        `validation_loss`, and `evaluation_seconds`.

    Raises:
        InputError: when no token of them counts, of which there is no mean.
    """
    jax.block_until_ready(params)  # the step that makes them is not part of the evaluation's time
    start = time.monotonic()
    with Batches(validation, program.batch_sharding, 0, len(validation)) as batches:
        sums = [program.eval_step(params, batch) for batch in batches]
    loss, tokens = (sum(float(x[name]) for x in sums) for name in ("loss", "tokens"))
    if not tokens:
        raise InputError(f"data.validation: no token counts in its {len(sums)} batches, all are masked.")
    return {"validation_loss": loss / tokens, "evaluation_seconds": time.monotonic() - start}


def _stop_signal(signals: list[int], step: int) -> int | None:
    """The signal after which the run is to end with this step, in all processes; None: go on."""
    if jax.process_count() == 1:
        return signals[0] if signals else None
    return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else None
