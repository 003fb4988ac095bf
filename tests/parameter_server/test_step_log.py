"""The numbers of steps: rates where steps are complete several at a time."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import metrics
from whole_runs import tiny

from jaxpar.config import Config
from jaxpar.console import progress
from jaxpar.parameter_server import step_log
from jaxpar.parameter_server.step_log import StepLog
from jaxpar.parameter_server.update import Update
from jaxpar.parameter_server.worker import Gradient, Ready

STEP_TOKENS = 8 * 16


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time, which a test sets."""
    time = [100.0]
    monkeypatch.setattr(step_log.time, "monotonic", lambda: time[0])
    yield time


def log_of(config: Config, first: int = 0) -> StepLog:
    log = StepLog(config, progress(Console(quiet=True)), first, flops_per_token=1)
    log.start_clock([Ready(config, "none", None, 0)])
    return log


def updates(step: int, count: int) -> list[Update]:
    gradient = Gradient(1, {"loss": 1.0}, STEP_TOKENS / count, 0, (), 0, 0, 0, 0.0)
    return [Update(step - 1, (part,), STEP_TOKENS / count, 1.0, 0, 0, 0, (gradient,)) for part in range(count)]


def rates(config: Config) -> list[tuple[float | None, float | None]]:
    lines = metrics(Path(config.train.run_dir))
    return [(line["tokens_per_second"], line["step_seconds"]) for line in lines]


def test_in_async_mode_progress_is_measured_in_updates(tmp_path: Path, now: list[float]):
    """Four each second, which are a step; a slow worker's parts hold back all steps but one in five."""
    mode = ("train.data_parallel=parameter_server", "parameter_server.mode=async", "parameter_server.workers=4")
    config = tiny(tmp_path, *mode)
    log = log_of(config)
    for burst in range(4):
        for step in range(5 * burst + 1, 5 * burst + 6):
            late = step > 5 * burst + 3  # by then another update has come, right after that which all waited for
            version = 4 * 5 * (burst + 1) + late
            now[0] = 100 + 5 * (burst + 1) + 0.001 * late
            log.take(step, updates(step, 4), version, 4)
    log.write()
    log.close()
    assert rates(config) == [(None, None)] * 5 + [(pytest.approx(STEP_TOKENS), pytest.approx(1.0))] * 15


def test_in_sync_mode_each_step_has_its_own_rates(tmp_path: Path, now: list[float]):
    """Without the time of an evaluation; and after a way back the first has none."""
    config = tiny(tmp_path, "train.data_parallel=parameter_server", "train.steps=6")
    log = log_of(config)
    for step, seconds in zip(range(1, 5), itertools.accumulate([0, 1, 2, 4]), strict=True):
        now[0] = 100 + seconds
        log.take(step, updates(step, 1), step, 2)
        if step == 2:
            log.evaluated(1.0, 0.5)
    log.go_back(3)
    for step, seconds in ((4, 20), (5, 21), (6, 23)):
        now[0] = 100 + seconds
        log.take(step, updates(step, 1), step, 2)
    log.write()
    log.close()
    taken = [None, 1, 1.5, None, 1, 2]
    assert rates(config) == [(seconds and pytest.approx(STEP_TOKENS / seconds), seconds) for seconds in taken]
