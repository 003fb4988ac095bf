"""What a run shows while it goes on: lines, a progress bar; and how it learns that it is to stop."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SHOWN = {
    "loss": ".4f",
    "validation_loss": ".4f",
    "grad_norm": ".3g",
    "learning_rate": ".3g",
    "staleness": ".3g",
    "tokens_per_second": ",.0f",
    "mfu": ".1%",
}
"""The metrics printed now and then, with their formats."""


def say(console: Console, text: str) -> None:
    """Print a line as it is; on a terminal it wraps between words, in a file it stays one line."""
    console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def progress(console: Console) -> Progress:
    """The bar of a run: steps, the loss, time gone and left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def show_step(bar: Progress, task: Any, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
    """Move the bar, and now and then, or after an evaluation, print a line."""
    bar.update(task, description="training", completed=step, loss=f"loss {metrics['loss']:.4f}")
    regular = step % max(1, steps // 20) == 0 or step == 1
    if "validation_loss" in metrics or (regular and not bar.console.is_terminal):
        shown = {name: metrics[name] for name in SHOWN if metrics.get(name) is not None}
        text = "  ".join(f"{name} {value:{SHOWN[name]}}" for name, value in shown.items())
        say(bar.console, f"step {step}/{steps}  {text}")
    if metrics["skipped_in_a_row"]:
        text = f"step {step} was not applied: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}"
        say(bar.console, text)


def too_many_bad_steps(bad: int, limit: int, saved: str) -> str:
    """Why a run stops whose steps are not finite, and what to do."""
    return (
        f"{bad} steps in a row had a loss or gradient that was not finite (train.max_bad_steps = {limit}). None of "
        f"them was applied; the last good state is in {saved}. Lower optimizer.learning_rate, set optimizer.clip_norm, "
        f"or look at the data of these steps, which metrics.jsonl marks with nonfinite."
    )


def stopped(number: int, step: int) -> str:
    """What is said when a signal has ended a run."""
    name = signal.Signals(number).name
    return f"stopped by {name} after step {step}, which is saved; the same command continues there"


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """A list that fills with signal numbers: on the first SIGINT or SIGTERM the run ends after its step, saved.

    With several processes SIGTERM is left to JAX, which makes all of them agree on the step. Outside the main thread
    Python delivers no signals.
    """
    received: list[int] = []
    before: dict[int, Any] = {}

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        os.write(2, b"\nstopping after this step, which is saved; the same signal again ends it at once\n")
        signal.signal(number, before[number])  # a second one ends it at once

    alone = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()
    for number in (signal.SIGINT, signal.SIGTERM) if alone else ():
        before[number] = signal.signal(number, handle)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
