"""Disturbed runs: calls take their time, processes die at any moment; and what the servers' logs tell of it."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from in_process import Answer, Died

from jaxpar.config import Config
from jaxpar.names import Named, named, nested
from jaxpar.optimizer import make_optimizer
from jaxpar.parameter_server.coordinator import Coordinator
from jaxpar.parameter_server.server import Server, schedule_of, updates_per_step
from jaxpar.parameter_server.slices import Slices, cut, take
from jaxpar.parameter_server.update import RolledBack
from jaxpar.parameter_server.worker import Gradient, Ready, ServerLost

# ------------------------------------------------------------------------------------------ what the servers' logs tell


@dataclass(frozen=True)
class Applied:
    """An update in the history of a server that counts: what went back is not in it."""

    version: int
    number: int
    staleness: int


def history(folder: Path, index: int, snapshots: Callable[[int], bool]) -> list[Applied]:
    """What a server's log says was applied and not taken back.

    Versions rise by one, go back only to snapshots (`snapshots` says of a version whether one was due), and no update
    is applied twice, not even once before and once after going back.
    """
    applied: list[Applied] = []
    numbers: set[int] = set()
    version = None
    for line in map(json.loads, (folder / f"server-{index}.jsonl").read_text().splitlines()):
        if line["event"] == "load":
            assert version is None or (line["version"] <= version and snapshots(line["version"])), line
            version = line["version"]
            applied = [update for update in applied if update.version <= version]
        if line["event"] == "apply":
            assert line["version"] == version + 1, line
            assert line["update"] not in numbers, line
            version = line["version"]
            numbers.add(line["update"])
            applied.append(Applied(version, line["update"], version - 1 - line["base_version"]))
    return applied


def one_history(folder: Path, config: Config, snapshots: Callable[[int], bool] | None = None) -> list[Applied]:
    """The history that all servers have in common, with no update that is too stale."""
    settings = config.parameter_server
    every = settings.snapshot_every * updates_per_step(config)
    due = snapshots or (lambda version: version % every == 0)
    first, *others = (history(folder, index, due) for index in range(settings.servers))
    assert all(other == first for other in others)
    bound = settings.max_staleness if settings.mode == "async" else 0
    assert all(0 <= update.staleness <= bound for update in first)
    return first


Call = tuple[int, int, int, int]
"""Number of the update, which share of it, step, part: what a worker was asked to compute."""


def parts_of(applied: Sequence[Applied], calls: Sequence[Call]) -> list[tuple[int, int]]:
    """The (step, part) of the updates that count, in their order; every one was asked for under one meaning."""
    meaning: dict[int, dict[int, tuple[int, int]]] = {}
    for number, share, step, part in calls:
        assert meaning.setdefault(number, {}).setdefault(share, (step, part)) == (step, part)
    return [part for update in applied for _, part in sorted(meaning[update.number].items())]


# ------------------------------------------------------------------------------------------------ calls that take time


class Reference:
    """What a late call will give; who stops waiting for it does not stop it."""

    def __init__(self, work: Awaitable[Any]) -> None:
        self.task = asyncio.ensure_future(work)
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def __await__(self) -> Generator[Any, Any, Any]:
        return asyncio.shield(self.task).__await__()


class Stopped(Exception):
    """What is raised where a worker would wait for a server that does not answer."""


class LateActor:
    """A process whose calls take turns with everybody else's. A worker's own calls of `pull` are answered at once."""

    def __init__(self, world: "World", kind: str, index: int, instance: Any) -> None:
        self.world, self.kind, self.index, self.instance = world, kind, index, instance
        self.alive, self.busy = True, False
        self.last: Reference | None = None

    def __getattr__(self, method: str) -> Any:
        return type("Method", (), {"remote": lambda _, *args: self.called(method, args)})()

    def called(self, method: str, args: tuple[Any, ...]) -> Any:
        caller = self.world.working
        if caller is None:
            self.last = Reference(self.later(method, args, self.last))
            return self.last
        if self.world.dies(caller, f"before its {method}"):
            raise Died(caller.kind)
        if method != "pull":
            return Reference(self.later(method, args))
        if self.alive and self.world.turns(self) is None:
            raise Stopped
        return Answer(lambda: self.execute(method, args))

    async def later(self, method: str, args: tuple[Any, ...], before: Reference | None = None) -> Any:
        if before:
            await asyncio.wait([before.task])
        turns = self.world.turns(self)
        if turns is None:
            await asyncio.sleep(3600)
        for _ in range(turns):
            await asyncio.sleep(0)
        try:
            return self.execute(method, args)
        except Stopped:
            await asyncio.sleep(args[-1])  # which is how long a worker waits for a server
            raise ServerLost from None

    def execute(self, method: str, args: tuple[Any, ...]) -> Any:
        if not self.alive or self.world.dies(self, method):
            raise Died(self.kind)
        caller, self.world.working = self.world.working, self if self.kind == "worker" else None
        try:
            result = getattr(self.instance, method)(*args)
        finally:
            self.world.working = caller
        if self.world.dies(self, f"after {method}"):
            raise Died(self.kind)
        return result


class PlainWorker:
    """Gradients that depend on the parameters, the step and the part, without a model."""

    def __init__(self, world: "World") -> None:
        self.world = world

    def ready(self) -> Ready:
        return Ready(self.world.config, "none", None, 0)

    def gradient(
        self, servers: Sequence[Any], era: int, update: int, share: int, step: int, part: int, timeout_seconds: float
    ) -> Gradient:
        self.world.calls.append((update, share, step, part))
        calls = [server.pull.remote(None) for server in servers]
        try:
            pulled = [call.get() for call in calls]
        except Died as error:
            raise ServerLost from error
        tokens = 3.0 + (step + part) % 4
        grad = lambda array: np.cos((1 + step) * array + part).astype(array.dtype)
        pushed = [
            server.push.remote(update, share, tokens, {name: grad(np.asarray(rows)) for name, rows in sent.items()})
            for server, (_, sent) in zip(servers, pulled, strict=True)
        ]
        return Gradient(update, {"loss": 1.0}, tokens, min(version for version, _ in pulled), pushed, 0, 0, 0, 0.0)


PARAMS = {
    "embed": np.linspace(-1, 1, 12).reshape(6, 2),
    "head": np.linspace(0, 1, 6).reshape(3, 2),
    "scale": np.ones(3),
}


@dataclass
class World:
    """`Actors` of this process, in which everything takes a random number of turns and may die.

    Attributes:
        config: of the run.
        folder: for the servers' logs and snapshots.
        seed: of all that is random.
        fate: whether an actor dies in a moment of its life: "norm" is before it has done it, "after norm" after.
        turns: how many turns a call takes; None: it takes forever.
    """

    config: Config
    folder: Path
    seed: int = 0
    fate: Callable[["World", LateActor, str], bool] = lambda world, actor, moment: False
    turns: Callable[[LateActor], int | None] = lambda actor: actor.world.random.randrange(4)
    calls: list[Call] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    deaths: list[tuple[str, int, str]] = field(default_factory=list)
    servers: list[LateActor] = field(default_factory=list)
    working: LateActor | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.slices = cut(PARAMS, self.config.parameter_server.servers, by_rows=True)

    def server(self, index: int) -> LateActor:
        made = Server(self.config, index, self.slices[index], str(self.folder))
        made._update = shared_update(
            self.config.model_dump_json(include={"optimizer", "parameter_server"}), made._update
        )
        self.servers.append(LateActor(self, "server", index, made))
        return self.servers[-1]

    def worker(self, index: int) -> LateActor:
        return LateActor(self, "worker", index, PlainWorker(self))

    def dies(self, actor: LateActor, moment: str) -> bool:
        if actor.alive and self.fate(self, actor, moment):
            actor.alive = False
            self.deaths.append((actor.kind, actor.index, moment))
            return True
        return False

    def kill(self, actor: LateActor) -> None:
        actor.alive = False
        if actor.kind == "server":
            actor.instance._writer.shutdown()

    def died(self, error: BaseException) -> bool:
        return isinstance(error, Died)

    def report(self, event: str, text: str, **numbers: Any) -> None:
        self.events.append({"event": event, "text": text, **numbers})


UPDATES: dict[str, Any] = {}


def shared_update(key: str, update: Any) -> Any:
    """One compiled update for all servers whose optimizers are the same."""
    return UPDATES.setdefault(key, update)


@dataclass
class Result:
    """What a run of the coordinator alone left."""

    state: list[tuple[Any, Any]]
    on_step: list[tuple[int, int]]
    coordinator: Coordinator


def coordinate(world: World, steps: int, pauses: Sequence[int] = (), seconds: float = 60.0) -> Result:
    """Start everything, make the updates of all steps however often servers die, and end."""
    return asyncio.run(asyncio.wait_for(_coordinate(world, steps, pauses), seconds))


async def _coordinate(world: World, steps: int, pauses: Sequence[int]) -> Result:
    reported: list[tuple[int, int]] = []
    on_step = lambda step, updates: reported.append((step, len(updates)))
    coordinator = Coordinator(world.config, world, 0, (0, 0), world.report, on_step)
    done, state = 0, []
    try:
        await coordinator.start(
            [(take(PARAMS, slices), optimizer_state(world.config, slices)) for slices in world.slices]
        )
        for stop in [*pauses, steps]:
            while not state or done < stop:
                try:
                    done = await coordinator.steps(done, stop)
                    state = await coordinator.state()
                except RolledBack as back:
                    done = back.step
                    reported[:] = [(step, updates) for step, updates in reported if step <= done]
        return Result(state, reported, coordinator)
    finally:
        await coordinator.close()


def optimizer_state(config: Config, slices: Slices) -> Named:
    """The optimizer's state for a server, before the first update."""
    optimizer = make_optimizer(config.optimizer, schedule_of(config))
    return named(jax.device_get(optimizer.init(jax.tree.map(jax.numpy.asarray, nested(take(PARAMS, slices))))))
