"""The numbers of steps on their way to metrics.jsonl and the progress bar, one step late."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpar.config import Config
from jaxpar.console import show_step
from jaxpar.metrics import MetricsWriter, StepClock, peak_memory_bytes
from jaxpar.optimizer import make_schedule
from jaxpar.parameter_server.server import updates_per_step
from jaxpar.parameter_server.update import Update, means
from jaxpar.parameter_server.worker import Ready


class StepLog:
    """Turns updates into the numbers of a step. They are written with the next step, or once they are complete.

    Args:
        config: of the run.
        bar: its progress bar.
        first: steps done before.
        flops_per_token: of the model, see `jaxpar.models.Facts`.

    Attributes:
        last: the numbers of the last step.
        bad: how many steps in a row were not finite.
        totals: bytes that workers sent and did not send.
        clock: keeps the time of steps.
    """

    def __init__(self, config: Config, bar: Any, first: int, flops_per_token: int) -> None:
        self._config, self._bar, self._flops_per_token = config, bar, flops_per_token
        self._per_step = updates_per_step(config)
        self._schedule = make_schedule(config.optimizer)
        self._task = bar.add_task("starting workers", completed=first, total=config.train.steps, loss="")
        self._writer = self._open(first)
        self._pending = False  # of the last numbers, whether they are still to be written
        self.last: dict[str, Any] = {}
        self.bad = 0
        self.totals = {"pulled_bytes": 0, "pushed_bytes": 0, "saved_bytes": 0}
        self._rates: dict[str, float] = {}
        self._read_at = 0  # the version at the clock's last reading

    @property
    def unevaluated(self) -> bool:
        """Whether there is a last step, and no evaluation after it."""
        return bool(self.last) and "validation_loss" not in self.last

    def start_clock(self, ready: Sequence[Ready]) -> None:
        """Begin to take the time of steps, with these workers."""
        self._ready = ready
        config = ready[0].config
        devices = len(ready) * config.mesh.data * config.mesh.pipe * config.mesh.tensor
        self.clock = StepClock(self._flops_per_token, ready[0].peak_flops_per_second, devices)
        self._rates, self._read_at = {}, 0

    def take(self, step: int, updates: Sequence[Update], version: int, workers: int) -> None:
        """Take in a step, and write the one before.

        Args:
            step: its number, from 1.
            updates: all of its updates.
            version: how many updates are made by now, those of earlier and later steps included.
            workers: how many are alive.
        """
        self.write()
        gradients = [g for update in updates for g in update.gradients]
        tokens = sum(g.tokens for g in gradients)
        last = updates[-1]
        sent = {name: sum(getattr(g, name) for g in gradients) for name in self.totals}
        self.totals = {name: total + sent[name] for name, total in self.totals.items()}
        made = step - 1 - (last.skipped - (last.skipped_in_a_row > 0)) // self._per_step
        self.bad = in_steps(last.skipped_in_a_row, self._per_step)
        self.last = {
            "step": step,
            **means(gradients),
            "grad_norm": sum(update.grad_norm for update in updates) / len(updates),
            "learning_rate": float(self._schedule(made)),
            "tokens": tokens,
            "skipped": last.skipped // self._per_step,
            "skipped_in_a_row": self.bad,
            "tokens_per_second": None,
            "step_seconds": None,
            **self._rates_at(version),
            "peak_memory_bytes": peak_memory_bytes(),
            "workers": workers,
            **sent,
        }
        if self._config.parameter_server.mode == "async":
            self.last["staleness"] = sum(update.staleness for update in updates) / len(updates)
        self._pending = True

    def _rates_at(self, version: int) -> dict[str, float]:
        """The rates over the last step's worth of updates or more.

        Updates are made evenly, but in async mode steps are complete, and so taken in, several at a time. The rates
        stay where fewer updates have come since the clock was read.
        """
        if not self._read_at or version - self._read_at >= self._per_step:
            self._read_at = version
            update_tokens = self._config.train.global_batch * self._config.data.sequence_length // self._per_step
            self._rates = self.clock.read(version, version * update_tokens, time.monotonic())
            if self._rates:
                self._rates["step_seconds"] *= self._per_step  # the clock was told of updates
        return self._rates

    def evaluated(self, loss: float, seconds: float) -> None:
        """Add an evaluation to the last step's numbers, and keep its time out of the next rates."""
        self.last |= {"validation_loss": loss, "evaluation_seconds": seconds}
        self.clock.leave_out(seconds)

    def write(self) -> None:
        """Write the last numbers, if that is not done."""
        if not self._pending:
            return
        self._pending = False
        step, steps = self.last["step"], self._config.train.steps
        if step % self._config.log.every == 0 or step == steps or self.bad or "validation_loss" in self.last:
            self._writer.write(step, {name: value for name, value in self.last.items() if name != "step"})
        show_step(self._bar, self._task, step, steps, self.last)

    def go_back(self, step: int) -> None:
        """Take back what was noted of steps after this one."""
        self.bad = 0
        if self.last and self.last["step"] <= step:
            self.write()
        else:
            self.last, self._pending = {}, False
        self._writer.close()
        self._writer = self._open(step)
        self.start_clock(self._ready)

    def close(self) -> None:
        """Close the files."""
        self._writer.close()

    def _open(self, step: int) -> MetricsWriter:
        return MetricsWriter(Path(self._config.train.run_dir), self._config.log.tensorboard, step)


def in_steps(updates: int, per_step: int) -> int:
    """Updates in steps, a begun one counted whole."""
    return -(-updates // per_step)
