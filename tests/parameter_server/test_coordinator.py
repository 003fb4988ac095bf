"""Which gradients make which update, with everything concurrent and anything dying: random interleavings and deaths."""

import itertools
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from disturbed import LateActor, World, coordinate, one_history, parts_of
from in_process import same
from whole_runs import tiny

from jaxpar.config import CheckFailed, Config
from jaxpar.parameter_server.coordinator import Coordinator
from jaxpar.parameter_server.shares import Shares

pytestmark = pytest.mark.usefixtures("quick_compiles")

STEPS = 12
WORKER_MOMENTS = ("gradient", "before its pull", "before its push", "after gradient")
"""Before it begins; between the pulls or pushes from and to one server and another; when all is pushed."""
SERVER_MOMENTS = tuple(
    after + method
    for after in ("", "after ")
    for method in ("pull", "push", "norm", "apply", "snapshot", "state", "ping", "drop")
)


def settings(folder: Path, mode: str, workers: int = 2, **others: Any) -> Config:
    values = {"servers": 2, "workers": workers, "mode": mode, "snapshot_every": 2, **others}
    overrides = [f"parameter_server.{name}={value}" for name, value in values.items()]
    return tiny(folder, "train.data_parallel=parameter_server", *overrides)


def check(world: World, result: Any, steps: int = STEPS) -> None:
    """Each part of each step is in exactly one update that counts, all servers agree, and nothing is left in memory."""
    config = world.config
    parts = parts_of(one_history(world.folder, config), world.calls)
    workers = range(config.parameter_server.workers)
    assert Counter(parts) == Counter(itertools.product(range(steps), workers)), world.seed
    per_step = len(workers) if config.parameter_server.mode == "async" else 1
    assert result.on_step == [(step, per_step) for step in range(1, steps + 1)], world.seed
    staleness = Counter(update.staleness for update in one_history(world.folder, config))
    assert +result.coordinator.staleness == staleness
    for server in world.servers:
        if server.alive:
            assert not server.instance._means and not server.instance._sums, world.seed


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_moment_of_a_workers_life_may_be_its_last(mode: str, tmp_path: Path):
    """At step s in the life of the worker with part p it dies in the moment number s: all moments, twice."""
    config = settings(tmp_path, mode, max_staleness=2)
    undisturbed = World(config, tmp_path / "undisturbed")
    want = coordinate(undisturbed, STEPS)
    check(undisturbed, want)
    moments = Counter[str]()

    def fate(world: World, actor: LateActor, moment: str) -> bool:
        if actor.kind == "server":
            return False
        moments[moment] += 1
        return moment == WORKER_MOMENTS[len(world.deaths) % 4] and moments[moment] % 5 == 0

    for seed in range(4):
        world = World(config, tmp_path / str(seed), seed, fate)
        result = coordinate(world, STEPS)
        check(world, result)
        assert {moment for _, _, moment in world.deaths} == set(WORKER_MOMENTS)
        said = Counter(event["event"] for event in world.events)
        assert said["worker_died"] >= 4 and said["share_recovered"] >= 4
        assert mode == "async" or same(result.state, want.state)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("moment", SERVER_MOMENTS)
def test_every_moment_of_a_servers_life_may_be_its_last(mode: str, moment: str, tmp_path: Path, undisturbed: Any):
    """One of the servers dies in that moment, three times in a run, for the first time early."""
    config = settings(tmp_path, mode)
    times = Counter[str]()

    def fate(world: World, actor: LateActor, at: str) -> bool:
        times[at] += 1
        if actor.kind == "worker" or len(world.deaths) > 4:
            return False
        if moment.endswith(("ping", "drop")) and at == "norm":
            return times[at] % 11 == 2  # these are only asked of servers when one has died
        return at == moment and times[at] % {"state": 3, "ping": 3, "drop": 3, "snapshot": 3}.get(at, 7) == 2

    world = World(config, tmp_path / "run", 1, fate)
    result = coordinate(world, STEPS, pauses=[4, 8])
    check(world, result)
    assert moment in {died_at for _, _, died_at in world.deaths}
    assert mode == "async" or same(result.state, undisturbed)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed")
    return coordinate(World(settings(folder, "sync"), folder / "run"), STEPS).state


def deaths_at_random(workers: float, servers: float) -> Any:
    """Each moment is the last with these probabilities; starts succeed."""

    def fate(world: World, actor: LateActor, moment: str) -> bool:
        probability = {"worker": workers, "server": servers}[actor.kind]
        return moment not in ("ready", "load", "snapshot_version") and world.random.random() < probability

    return fate


def test_sync_is_bit_for_bit_the_same_however_many_die(tmp_path: Path, undisturbed: Any):
    deaths = Counter[str]()
    for seed in range(16):
        world = World(settings(tmp_path, "sync"), tmp_path / str(seed), seed, deaths_at_random(0.03, 0.004))
        result = coordinate(world, STEPS)
        check(world, result)
        assert same(result.state, undisturbed), seed
        deaths.update(kind for kind, _, _ in world.deaths)
    assert min(deaths["worker"], deaths["server"]) > 15


@pytest.mark.parametrize("max_staleness", [0, 1, 3, 7, 20])
def test_async_uses_each_part_once_and_nothing_too_stale(max_staleness: int, tmp_path: Path):
    config = settings(tmp_path, "async", workers=4, max_staleness=max_staleness, snapshot_every=1)
    refused, restored, in_the_middle = 0, 0, 0
    for seed in range(8):
        fate = deaths_at_random(0.01, 0.002) if seed % 2 else deaths_at_random(0, 0)
        slow = lambda actor: actor.world.random.randrange(30 if actor.index == 0 else 4)
        world = World(config, tmp_path / str(seed), seed, fate, slow)
        result = coordinate(world, STEPS, pauses=[5])
        check(world, result)
        refused += result.coordinator.refused
        back = [event for event in world.events if event["event"] == "server_restored"]
        restored += len(back)
        order = parts_of(one_history(world.folder, config), world.calls)
        in_the_middle += sum(
            any(step * 4 >= event["version"] for step, _ in order[: event["version"]]) for event in back
        )
    assert restored >= 3
    assert refused or max_staleness >= 7
    assert in_the_middle or max_staleness < 7, restored  # a snapshot with a part of a step, but not with all before


def test_a_slow_worker_leaves_its_last_part_to_others(tmp_path: Path):
    """It never gets ready with its first share, and there is one update of it all the same."""
    turns = lambda actor: None if (actor.kind, actor.index) == ("worker", 0) and actor.world.calls else 1
    config = settings(tmp_path, "async", workers=4, max_staleness=20)
    world = World(config, tmp_path / "run", turns=turns)
    result = coordinate(world, STEPS)
    check(world, result)
    assert not [event for event in world.events if event["event"] == "worker_died"]


def test_async_forgets_what_it_does_not_need(tmp_path: Path):
    """Updates before the newest snapshot, but not while their step has a part that is still to be made."""
    world = World(settings(tmp_path, "async", workers=4), tmp_path / "run")
    result = coordinate(world, 40)
    check(world, result, 40)
    assert len(result.coordinator._made) < 4 * 2 * 4


@pytest.mark.parametrize("kind, mode", [("worker", "sync"), ("server", "sync"), ("server", "async")])
def test_what_does_not_answer_is_replaced(kind: str, mode: str, tmp_path: Path):
    """A stopped server is not taken for stopped workers, though these do not answer either while they wait for it."""
    config = settings(tmp_path, mode, worker_timeout_seconds=1.5)
    stopped: list[LateActor] = []

    def turns(actor: LateActor) -> int | None:
        if not stopped and actor.kind == kind and len(actor.world.calls) == 6:
            stopped.append(actor)
        return None if actor in stopped else 1

    world = World(config, tmp_path / "run", turns=turns)
    result = coordinate(world, STEPS)
    check(world, result)
    said = Counter(event["event"] for event in world.events)
    assert (said["worker_died"], said["server_restored"]) == ((1, 0) if kind == "worker" else (0, 1))
    if kind == "worker":
        (text,) = (event["text"] for event in world.events if event["event"] == "worker_died")
        index = stopped[0].index
        assert text.startswith(f"worker {index} did not answer within parameter_server.worker_timeout_seconds 1.5; ")
    else:
        (text,) = (event["text"] for event in world.events if event["event"] == "server_restored")
        index = stopped[0].index
        assert text.startswith(
            f"server {index} did not answer within parameter_server.worker_timeout_seconds 1.5; all are back "
        )


def test_servers_that_die_again_and_again_end_the_run(tmp_path: Path):
    config = settings(tmp_path, "sync")
    fate = lambda world, actor, moment: moment == "apply" and actor.instance.version == 3
    with pytest.raises(CheckFailed, match=r"lost 11 times in a row before .* version [02]: server [01] died"):
        coordinate(World(config, tmp_path / "apply", fate=fate), STEPS)
    fate = lambda world, actor, moment: moment == "restore" or (moment == "apply" and actor.instance.version == 3)
    with pytest.raises(CheckFailed, match=r"lost 3 times in a row on the way back to version [02]: server [01] died"):
        coordinate(World(config, tmp_path / "restore", fate=fate), STEPS)
    fate = lambda world, actor, moment: moment == "load"
    with pytest.raises(CheckFailed, match=r"lost 3 times in a row while they started: the last one died\."):
        coordinate(World(config, tmp_path / "load", fate=fate), STEPS)


def test_deaths_while_all_starts(tmp_path: Path, undisturbed: Any):
    died = Counter[tuple[str, str]]()

    def fate(world: World, actor: LateActor, moment: str) -> bool:
        died[actor.kind, moment] += 1
        return moment in ("load", "snapshot_version", "ready") and died[actor.kind, moment] == 1

    world = World(settings(tmp_path, "sync"), tmp_path / "run", fate=fate)
    result = coordinate(world, STEPS)
    assert len(world.deaths) == 3
    assert same(result.state, undisturbed)


def test_shares_that_are_begun_are_done_whole_when_asked_to_stop():
    for seed in range(200):
        choose = random.Random(seed)
        made = {(step, part) for step in range(2, 5) for part in range(3) if choose.random() < 0.3}
        asked: list[bool] = []
        shares = Shares(2, 9, 3, made, partial(bool, asked))
        done, under_way, begun = Counter(made), [], Counter[tuple[int, int]]()
        for _ in range(500):
            if choose.random() < 0.1:
                asked.append(True)
            if under_way and choose.random() < 0.5:
                share = under_way.pop(choose.randrange(len(under_way)))
                if choose.random() < 0.2:
                    under_way.append(share)  # refused: once more
                elif shares.claim(share):
                    done[share] += 1
                    shares.made(share)
            elif share := shares.begin():
                under_way.append(share)
                begun[share] += 1
        assert not shares.left and set(done.values()) == {1}
        last = max(step for step, _ in done)
        assert set(done) == {*made, *itertools.product(range(2, last + 1), range(3))}
        assert max(begun.values()) <= 2  # nothing is done by more than two


def test_between_steps_is_where_no_part_of_a_later_one_is_made(tmp_path: Path):
    for mode, updates in (("sync", 1), ("async", 2)):
        coordinator = Coordinator(settings(tmp_path, mode), None, 3, (0, 0), print, print)  # pyright: ignore[reportArgumentType]
        assert coordinator.between_steps
        coordinator.version += 1
        assert not coordinator.between_steps
        coordinator.reported, coordinator.version = 4, coordinator.version + updates - 1
        assert coordinator.between_steps
