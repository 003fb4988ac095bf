"""Whole runs in this process, with deaths at every kind of call, signals, and steps that are not finite.

Whatever dies, a run's folder ends up as that of the undisturbed run: in sync mode bit for bit.
"""

import asyncio
import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disturbed import Call, one_history, parts_of
from in_process import Actor, InProcess
from test_trainer import POISON, damaged, make_poisoned, poison, trained
from tiny_run import metrics
from whole_runs import same_bits, saved, tiny, with_servers

from jaxpar.checkpoint import Checkpoints
from jaxpar.config import CheckFailed, Config, InputError
from jaxpar.data.sources import open_data
from jaxpar.data.tokenize import tokenize_files
from jaxpar.parameter_server import cluster, run
from jaxpar.parameter_server.coordinator import Coordinator
from jaxpar.parameter_server.server import Server
from jaxpar.parameter_server.worker import Worker
from jaxpar.step import MakeModel

pytestmark = pytest.mark.usefixtures("quick_compiles")

STEPS = 12
PAUSES = (
    "data.validation=0.1",
    f"train.steps={STEPS}",
    "train.eval_every=4",
    "train.eval_batches=1",
    "checkpoint.every=5",
)
EVERY_2 = "parameter_server.snapshot_every=2"


class Recorded(Worker):
    """Notes what it is asked for, and which rows it reads for it."""

    calls: list[Call]
    read: list[tuple[int, int, bytes]]

    def gradient(self, servers: Sequence[Any], era: int, update: int, share: int, step: int, part: int, timeout: float):
        self.calls.append((update, share, step, part))
        return super().gradient(servers, era, update, share, step, part, timeout)

    def _rows(self, which: str, step: int, part: int) -> Any:
        first, batch = super()._rows(which, step, part)
        if which == "train":
            self.read.append((step, part, np.asarray(batch["tokens"]).tobytes()))
        return first, batch


class Disturbed:
    """Makes actors that die as a test wants, and remembers what they did.

    Args:
        dies: whether a process dies before a call, from its kind, the method, and how often that was called.
        make_model: for the workers.
    """

    def __init__(
        self,
        dies: Callable[[str, str, int], bool] = lambda kind, method, times: False,
        make_model: MakeModel | None = None,
    ) -> None:
        self.dies, self.make_model, self.times, self.deaths = (
            dies,
            make_model,
            Counter[tuple[str, str]](),
            Counter[str](),
        )
        self.calls: list[Call] = []
        self.read: list[tuple[int, int, bytes]] = []

    def __call__(self, config: Config, slices: Any, folder: Path) -> InProcess:
        noting = type("Noting", (Recorded,), {"calls": self.calls, "read": self.read})
        worker: Any = lambda *args: noting(*args, self.make_model)
        return InProcess(config, slices, folder, self.before_call, worker)

    def before_call(self, actor: Actor, method: str) -> None:
        kind = "server" if isinstance(actor.instance, Server) else "worker"
        self.times[kind, method] += 1
        if actor.alive and self.dies(kind, method, self.times[kind, method]):
            actor.alive = False
            self.deaths[method] += 1


def check(config: Config, disturbed: Disturbed, versions: Sequence[int] = ()) -> None:
    """Each part of each batch is in one update that counts, read from the right rows; each step is in metrics once."""
    run_dir, workers = Path(config.train.run_dir), config.parameter_server.workers
    per_step = workers if config.parameter_server.mode == "async" else 1
    every = per_step * config.parameter_server.snapshot_every
    saves = {per_step * step for step in (*range(0, STEPS, 5), STEPS, *versions)}
    applied = one_history(
        run_dir / "parameter_server", config, lambda version: version % every == 0 or version in saves
    )
    parts = parts_of(applied, disturbed.calls)
    assert Counter(parts) == Counter(itertools.product(range(config.train.steps), range(workers)))
    rows, count = open_data(config, run_dir / "tokens").train.rows, config.train.global_batch // workers
    for step, part, tokens in disturbed.read:
        assert np.asarray(rows(step, range(part * count, (part + 1) * count))["tokens"]).tobytes() == tokens
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, config.train.steps + 1))
    evaluated = [line["step"] for line in lines if "validation_loss" in line]
    assert evaluated == sorted({*range(4, STEPS, 4), STEPS})
    assert [int(path.name) for path in sorted((run_dir / "checkpoints").iterdir(), key=lambda p: int(p.name))][
        -1
    ] == STEPS


UNDISTURBED: dict[Path, Config] = {}


@pytest.fixture
def undisturbed(quick_compiles: None, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run that nothing disturbs, made once; compiled as the others are, so that it rounds as they do."""
    base = tmp_path_factory.getbasetemp()
    if base not in UNDISTURBED:
        disturbed = Disturbed()
        folder = tmp_path_factory.mktemp("undisturbed")
        config = UNDISTURBED[base] = with_servers(folder, *PAUSES, EVERY_2, make_actors=disturbed)
        check(config, disturbed)
        assert len(disturbed.calls) == len(disturbed.read) == 2 * STEPS
    return UNDISTURBED[base]


def same_run(got: Config, want: Config) -> None:
    """The same metrics and the same checkpoints, bit for bit."""
    assert trained(Path(got.train.run_dir)) == trained(Path(want.train.run_dir))
    for step in (5, 10, STEPS):
        assert same_bits(saved(got, step), saved(want, step))


CALLS = ("pull", "push", "norm", "apply", "snapshot", "snapshot_version", "state", "restore", "ping")


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_servers_that_die_at_every_kind_of_call(turn: int, mode: str, tmp_path: Path, undisturbed: Config):
    """Each kind of call is the last of a server at least once, if not with the first third of kinds, with another."""
    kinds = {*CALLS[turn::3], "norm"}  # one that is sure to come, so that there is something to go back for
    periods = {"pull": 23, "push": 19, "state": 4, "snapshot_version": 5, "restore": 3, "ping": 1}
    left = Counter(dict.fromkeys(kinds, 2))

    def dies(kind: str, method: str, times: int) -> bool:
        period = periods.get(method, 7)
        if kind == "worker" or left[method] <= 0 or times % period != 2 % period:
            return False
        left[method] -= 1
        return True

    disturbed = Disturbed(dies)
    config = with_servers(tmp_path, *PAUSES, EVERY_2, f"parameter_server.mode={mode}", make_actors=disturbed)
    check(config, disturbed)
    assert set(disturbed.deaths) == kinds
    if mode == "sync":
        same_run(config, undisturbed)


def test_workers_that_die_in_shares_and_in_evaluations(tmp_path: Path, undisturbed: Config):
    disturbed = Disturbed(lambda kind, method, times: kind == "worker" and times % 4 == 2)
    config = with_servers(tmp_path, *PAUSES, EVERY_2, make_actors=disturbed)
    check(config, disturbed)
    assert min(disturbed.deaths[method] for method in ("gradient", "evaluate", "ready") if method != "ready") >= 2
    same_run(config, undisturbed)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("every", [1, 100])
def test_what_is_due_after_a_step_is_done_though_servers_die_in_it(
    mode: str, every: int, tmp_path: Path, undisturbed: Config
):
    """In the first and the last evaluation, in each save, at the very end; a step before is lost (100), or none (1)."""
    evaluating: list[bool] = []
    left = Counter(pull=2, state=2, snapshot=1, snapshot_version=1, busy_seconds=1)
    first = {"pull": 2, "state": 1, "snapshot": 4, "snapshot_version": 4, "busy_seconds": 1}
    asked = Counter[str]()

    def dies(kind: str, method: str, times: int) -> bool:
        if kind == "worker":
            evaluating[:] = [method == "evaluate"]
        elif method != "pull" or evaluating[0]:
            asked[method] += 1
            if left[method] and asked[method] >= first[method] and (method != "state" or asked[method] in (1, 7)):
                left[method] -= 1
                return True
        return False

    disturbed = Disturbed(dies)
    overrides = (*PAUSES, f"parameter_server.mode={mode}", f"parameter_server.snapshot_every={every}")
    config = with_servers(tmp_path, *overrides, make_actors=disturbed)
    assert disturbed.deaths == Counter(pull=2, state=2, snapshot=1, snapshot_version=1, busy_seconds=1)
    check(config, disturbed)
    if mode == "sync":
        same_run(config, undisturbed)


@pytest.mark.parametrize("mode, number", [("sync", signal.SIGTERM), ("async", signal.SIGINT)])
def test_a_signal_ends_a_run_within_a_step_and_the_same_command_goes_on(
    mode: str, number: int, capsys, tmp_path: Path, undisturbed: Config
):
    """In the middle of step 7; a server dies in the save, so that this is done again."""
    disturbed = Disturbed()

    def dies(kind: str, method: str, times: int) -> bool:
        if (kind, method, times) == ("worker", "gradient", 13):
            os.kill(os.getpid(), number)
            asked.append(max(step for _, _, step, _ in disturbed.calls))
        return bool(asked) and method == "state" and not disturbed.deaths

    asked: list[int] = []
    disturbed.dies = dies
    overrides = (*PAUSES, EVERY_2, f"parameter_server.mode={mode}", "parameter_server.max_staleness=1")
    with pytest.raises(SystemExit) as stop:
        with_servers(tmp_path, *overrides, make_actors=disturbed)
    assert stop.value.code == 128 + number
    assert disturbed.deaths == Counter(state=1)
    (last,) = asked
    done = metrics(tmp_path / "run")[-1]["step"]
    assert done == max(step for _, _, step, _ in disturbed.calls) + 1 and last + 1 <= done <= last + 2
    assert f"stopped by {signal.Signals(number).name} after step {done}, which is saved" in capsys.readouterr().out
    assert int(saved(tiny(tmp_path, *overrides))["step"]) == done
    (tmp_path / "run" / "parameter_server").rename(tmp_path / "before")
    again = Disturbed()
    config = with_servers(tmp_path, *overrides, make_actors=again)
    assert f"continued after step {done}" in capsys.readouterr().out
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
    folders = {tmp_path / "before": disturbed, tmp_path / "run" / "parameter_server": again}
    reports = [json.loads((folder / "report.json").read_text()) for folder in folders]
    assert [report["steps"] for report in reports] == [[1, done], [done + 1, STEPS]]
    updates = [sum(report["staleness"].values()) for report in reports]
    per_step = 2 if mode == "async" else 1
    assert updates == [done * per_step, (STEPS - done) * per_step]
    histories = [parts_of(one_history(folder, config, lambda _: True), run.calls) for folder, run in folders.items()]
    assert Counter(itertools.chain(*histories)) == Counter(itertools.product(range(STEPS), range(2)))
    if mode == "sync":
        assert trained(Path(config.train.run_dir)) == trained(Path(undisturbed.train.run_dir))
        assert same_bits(saved(config, STEPS), saved(undisturbed, STEPS))


def test_a_signal_while_workers_start(capsys, tmp_path: Path, undisturbed: Config):
    disturbed = Disturbed()
    disturbed.dies = lambda kind, method, times: (
        (method, times) == ("load", 1) and bool(os.kill(os.getpid(), signal.SIGTERM))
    )
    with pytest.raises(SystemExit) as stop:
        with_servers(tmp_path, *PAUSES, EVERY_2, make_actors=disturbed)
    assert stop.value.code == 143 and disturbed.calls == []
    said = capsys.readouterr().out
    assert "stopped by SIGTERM after step 0" in said
    assert "steps 1 to 0" not in said and not (tmp_path / "run" / "parameter_server" / "report.json").exists()
    config = with_servers(tmp_path, *PAUSES, EVERY_2)
    same_run(config, undisturbed)


@pytest.mark.parametrize("mode, workers", [("sync", 2), ("async", 1)])
def test_too_many_bad_steps_in_a_row_stop_the_run(mode: str, workers: int, capsys, tmp_path: Path):
    """From step 5 on; a server dies after three of them, and what is counted is right all the same."""
    mode_settings = (f"parameter_server.mode={mode}", "parameter_server.max_staleness=0")
    settings = ("data.validation=0.1", "train.max_bad_steps=4", EVERY_2, *mode_settings)
    tiny(tmp_path)
    poison(tmp_path / "tiny.yaml", dict.fromkeys(range(5, 21), POISON))
    make_model = make_poisoned(tiny(tmp_path, *settings))
    disturbed = Disturbed(lambda kind, method, times: (kind, method, times) == ("server", "apply", 15), make_model)

    def stopped_after(step: int, skipped: int) -> None:
        with pytest.raises(CheckFailed, match=r"^4 steps in a row had a loss or gradient that was not finite"):
            with_servers(tmp_path, *settings, workers=workers, make_actors=disturbed, make_model=make_model)
        state = saved(tiny(tmp_path, *settings))
        assert (state["step"], state["skipped"], state["skipped_in_a_row"]) == (step, skipped, 4)
        counts = [line["skipped_in_a_row"] for line in metrics(tmp_path / "run")]
        assert counts == [*[0] * 4, *range(1, 5), *range(1, 5)][:step]

    stopped_after(8, 4)
    assert disturbed.deaths == Counter(apply=1)
    assert f"\n{'2 workers are' if workers == 2 else '1 worker is'} ready after " in capsys.readouterr().out
    stopped_after(12, 8)  # the same command has its four tries again


@pytest.mark.parametrize("mode", ["sync", "async", "async, other part made"])
@pytest.mark.parametrize("step", [1, 8])
def test_a_batch_that_a_worker_refuses_ends_the_run_saved(
    mode: str, step: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, undisturbed: Config
):
    """In async mode the other part of the step may be made by then: the newest checkpoint stays.

    Mended, the run goes on as if nothing had been.
    """
    mode, _, other_made = mode.partition(", ")
    if other_made:
        monkeypatch.setattr(Coordinator, "between_steps", False)
    mode_settings = (f"parameter_server.mode={mode}", "parameter_server.max_staleness=0")
    tiny(tmp_path)
    tokenize_files([f"{tmp_path}/text.txt"], file := tmp_path / "text.tokens")
    settings = (*PAUSES, EVERY_2, f"data.train=[{file}]", *mode_settings)
    with damaged(tiny(tmp_path, *settings), file, step) as at, pytest.raises(InputError) as refused:
        with_servers(tmp_path, *settings, make_actors=Disturbed())
    with Checkpoints(tmp_path / "run" / "checkpoints", keep=9) as checkpoints:
        latest = checkpoints.latest_step()
    assert latest == (None if step == 1 else 5 if other_made else 7)
    saved_or_not = "Nothing was saved." if latest is None else f"The state after step {latest} is saved"
    for said in (f"a batch was refused: {file} holds the id 65535 at token {at} ", saved_or_not):
        assert said in str(refused.value)
    if latest:
        assert [line["step"] for line in metrics(tmp_path / "run")][:latest] == list(range(1, latest + 1))
    config = with_servers(tmp_path, *settings, make_actors=Disturbed())
    if mode == "sync":
        same_run(config, undisturbed)
    else:
        assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("answer", [lambda: False, lambda: 1 / 0, lambda: time.sleep(60)], ids=["no", "error", "none"])
def test_a_run_ends_when_ray_itself_is_dead(answer: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing would ever answer: calls hang, and no process can be started."""
    monkeypatch.setattr(run, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(run, "ANSWER_SECONDS", 0.2)

    async def no_answer(*args: Any) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(Coordinator, "steps", no_answer)
    monkeypatch.setattr(InProcess, "alive", lambda actors: answer())
    began = time.monotonic()
    with pytest.raises(CheckFailed, match=r"Ray itself died on this machine.*starts it anew and begins again"):
        with_servers(tmp_path)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "override, said",
    [
        ("parameter_server.servers=99", "servers 99 ≤ 12, the number of the model's parameter arrays"),
        ("parameter_server.ray_address=head", "ray_address head must be host:port"),
    ],
)
def test_what_is_wrong_is_refused_before_ray_starts_and_text_is_read(
    override: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cluster, "_initialise", lambda *args: pytest.fail("Ray was started"))
    with pytest.raises(InputError, match=said):
        run.train(tiny(tmp_path, "train.data_parallel=parameter_server", override))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


def test_no_two_runs_are_in_a_folder_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """While `train` has its cluster, another one is refused; afterwards it is not."""
    config = tiny(tmp_path, "train.data_parallel=parameter_server")
    in_the_cluster: list[str] = []

    @contextmanager
    def no_cluster(address: str | None) -> Iterator[None]:
        in_the_cluster.append("entered")
        if len(in_the_cluster) == 1:
            run.train(config)
        yield

    monkeypatch.setattr(run, "cluster", no_cluster)
    monkeypatch.setattr(run, "train_with", lambda *args: {"step": 1})
    with pytest.raises(InputError, match=f"^train.run_dir = {tmp_path}/run is in use: another process, {os.getpid()} "):
        run.train(config)
    assert len(in_the_cluster) == 1 and run.train(config) == {"step": 1}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_checkpoint_is_ahead_of_the_metrics(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run that is killed right after a save goes on from it, and every step is in metrics.jsonl."""
    save, written = Checkpoints.save, []

    def noting(self: Checkpoints, step: int, *args: Any, **kwargs: Any) -> None:
        written.append((step, metrics(tmp_path / "run")[-1]["step"]))
        save(self, step, *args, **kwargs)

    monkeypatch.setattr(Checkpoints, "save", noting)
    with_servers(tmp_path, *PAUSES, f"parameter_server.mode={mode}")
    assert written == [(5, 5), (10, 10), (STEPS, STEPS)]
