"""Where a run's numbers go: `metrics.jsonl`, TensorBoard, and the clock that turns step times into rates."""

import contextlib
import importlib
import json
import logging
import math
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax

from jaxpar.config import InputError
from jaxpar.flops import mfu


class MetricsWriter:
    """Writes one line of JSON for each call, and the same numbers to TensorBoard when asked.

    A line is an object with `step` first. A value that is not finite has no JSON number: it is written as null and its
    name is listed under `nonfinite`, so that every line is valid JSON and the reason for a null is on the line.

    A resumed run writes its steps again: lines of steps after `resume_step` are dropped when the file is opened, and so
    is a last line that was cut off when the run was killed.

    Args:
        run_dir: the run's folder, made if missing. The file is `run_dir/metrics.jsonl`; TensorBoard reads
            `run_dir/tensorboard`.
        tensorboard: write TensorBoard files too.
        resume_step: the last step that counts as done; 0 for a new run.
        process_index: this process. Only process 0 writes, the others do nothing.

    Raises:
        InputError: when TensorBoard is asked for and tensorboardX is not installed, or the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, MetricsWriter(Path(folder), tensorboard=False) as writer:
        ...     writer.write(1, {"loss": 2.5, "grad_norm": float("inf")})
        ...     print((Path(folder) / "metrics.jsonl").read_text().strip())
        {"step": 1, "loss": 2.5, "grad_norm": null, "nonfinite": ["grad_norm"]}
    """

    def __init__(self, run_dir: Path, tensorboard: bool, resume_step: int = 0, *, process_index: int = 0) -> None:
        self._file = None
        self._board = None
        if process_index != 0:
            return
        if tensorboard:
            self._board = _open_board(run_dir / "tensorboard", resume_step)
        path = run_dir / "metrics.jsonl"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            _keep_until(path, resume_step)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"{path} cannot be written: {error.strerror}. Make room or choose another train.run_dir."
            ) from error

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of one step and flush.

        Args:
            step: the step they belong to.
            metrics: name to number, string, boolean or None. Arrays of one element are read, which waits for them:
                pass those of an earlier step.

        Raises:
            InputError: when the disk is full.
        """
        if self._file is None:
            return
        values = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        nonfinite = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        line = {"step": step} | values | dict.fromkeys(nonfinite)
        if nonfinite:
            line["nonfinite"] = nonfinite
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # closing tries to write the rest once more
                self._file.close()
            raise InputError(f"{self._file.name} cannot be written: {error.strerror}. Make room and resume.") from error
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _open_board(folder: Path, resume_step: int) -> Any:
    try:
        tensorboard_x = importlib.import_module("tensorboardX")
    except ImportError as error:
        raise InputError(
            "log.tensorboard is true, but tensorboardX is not installed. "
            'Install it with: pip install "jaxpar[tensorboard]", or set log.tensorboard=false.'
        ) from error
    return tensorboard_x.SummaryWriter(str(folder), purge_step=resume_step + 1)


def _keep_until(path: Path, resume_step: int) -> None:
    """Rewrite the file with the whole lines of steps up to `resume_step`; the old file stays until the new is there."""
    if not path.exists():
        return
    kept, broken = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if int(json.loads(line)["step"]) <= resume_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            broken += 1
    if broken:
        logging.getLogger(__name__).warning("%s: dropped %d lines that were cut off", path, broken)
    rewritten = path.with_suffix(".jsonl.tmp")
    rewritten.write_text("".join(kept), encoding="utf-8")
    os.replace(rewritten, path)


class StepClock:
    """Turns the times at which steps were seen finished into rates.

    The trainer reads a step's metrics while the next step runs, so times arrive one step late, but evenly: the distance
    between two readings is the time of the steps between them. The first reading only starts the clock, which keeps
    compilation out of the rates.

    Args:
        flops_per_token: from `jaxpar.flops.flops_per_token`.
        peak_flops_per_second: of one device, from `jaxpar.flops.peak_flops_per_second`; None: no MFU.
        devices: how many devices share the work.

    Example:
        >>> clock = StepClock(flops_per_token=10**9, peak_flops_per_second=1e12, devices=2)
        >>> clock.read(step=1, tokens=4096, now=100.0)
        {}
        >>> clock.read(step=3, tokens=3 * 4096, now=108.0)
        {'tokens_per_second': 1024.0, 'step_seconds': 4.0, 'mfu': 0.512}
    """

    def __init__(self, flops_per_token: int, peak_flops_per_second: float | None, devices: int) -> None:
        self._flops_per_token = flops_per_token
        self._peak = peak_flops_per_second
        self._devices = devices
        self._last: tuple[int, int, float] | None = None

    def read(self, step: int, tokens: int, now: float) -> dict[str, float]:
        """Take a reading when a step is seen finished.

        Args:
            step: the finished step.
            tokens: tokens trained on up to and including it, over all devices.
            now: seconds, from any steady clock.

        Returns:
            `tokens_per_second` over all devices, `step_seconds`, and `mfu` (a share, where the peak is known) since the
            reading before; empty at the first.
        """
        last, self._last = self._last, (step, tokens, now)
        if last is None:
            return {}
        seconds = now - last[2]
        rate = (tokens - last[1]) / seconds
        share = mfu(rate, self._flops_per_token, self._devices, self._peak)
        rates = {"tokens_per_second": rate, "step_seconds": seconds / (step - last[0])}
        return rates if share is None else rates | {"mfu": share}

    def leave_out(self, seconds: float) -> None:
        """Keep time that went to something else than steps (evaluation) out of the next rates.

        Args:
            seconds: how long it took, on the same clock.
        """
        if self._last is not None:
            self._last = (*self._last[:2], self._last[2] + seconds)


def peak_memory_bytes() -> int:
    """Return the greatest amount of memory in use so far.

    On accelerators it is the allocator's peak, the greatest of this process's devices. CPU devices keep no such count:
    there it is the peak resident memory of the whole process, over all virtual devices, Python included.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if stat]
    if peaks:
        return max(peaks)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024  # getrusage(2): bytes on macOS, KiB on Linux
