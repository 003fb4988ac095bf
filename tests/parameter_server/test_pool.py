"""The workers: tasks to whoever is free, below the minimum to nobody; what is done and said when one dies."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxpar.config import CheckFailed, InputError
from jaxpar.parameter_server import pool as pool_module
from jaxpar.parameter_server.pool import LOSSES, TRIES, Pool
from jaxpar.parameter_server.worker import Ready


class Died(Exception):
    pass


@dataclass(eq=False)
class Fake:
    """A worker: `await fake.work(x)` gives x, or what the test has it do."""

    actors: "FakeActors"
    index: int
    number: int
    alive: bool = True

    @property
    def ready(self) -> Any:
        return type("Method", (), {"remote": lambda _: self.actors.starts(self)})()

    async def work(self, x: Any) -> Any:
        if self.alive:
            await self.actors.during(self, x)
        if not self.alive:
            raise Died
        return x, self.index


@dataclass
class FakeActors:
    """`Actors` without processes.

    Attributes:
        start: awaited by the start of each worker; raises where it is to fail.
        during: awaited by each task.
    """

    start: Callable[[Fake], Awaitable[None]] = field(default=lambda fake: asyncio.sleep(0))
    during: Callable[[Fake, Any], Awaitable[None]] = field(default=lambda fake, x: asyncio.sleep(0))
    made: list[Fake] = field(default_factory=list)
    said: list[tuple[str, str]] = field(default_factory=list)

    def server(self, index: int) -> Any:
        raise AssertionError

    def worker(self, index: int) -> Fake:
        self.made.append(Fake(self, index, len(self.made)))
        return self.made[-1]

    async def starts(self, fake: Fake) -> Ready:
        await self.start(fake)
        return Ready(None, "none", None, fake.number)  # pyright: ignore[reportArgumentType]

    def kill(self, actor: Fake) -> None:
        actor.alive = False

    def died(self, error: BaseException) -> bool:
        return isinstance(error, Died)

    def report(self, event: str, text: str, **numbers: Any) -> None:
        self.said.append((event, text))

    def count(self, event: str) -> int:
        return Counter(name for name, _ in self.said)[event]


def with_pool(
    actors: FakeActors,
    test: Callable[[Pool], Awaitable[Any]],
    count: int = 3,
    minimum: int = 1,
    lanes: int = 1,
    timeout_seconds: float = 20,
) -> Any:
    """Run a test with a pool that has started; nobody may be left alive by it."""

    async def run() -> Any:
        pool = Pool(actors, count, minimum, timeout_seconds, lanes, actors.report)
        try:
            await pool.start()
            return await test(pool)
        finally:
            await pool.close()

    try:
        return asyncio.run(asyncio.wait_for(run(), 20))
    finally:
        assert not any(fake.alive for fake in actors.made)


def tasks(pool: Pool, count: int) -> Awaitable[list[Any]]:
    return asyncio.gather(*(pool.run(lambda worker, x=x: worker.work(x)) for x in range(count)))


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("lanes", [1, 2])
def test_each_task_is_done_once_by_somebody(lanes: int):
    at_work, most = Counter[int](), Counter[int]()

    async def during(fake: Fake, x: Any) -> None:
        at_work[fake.index] += 1
        most[fake.index] = max(most[fake.index], at_work[fake.index])
        await turns(3)
        at_work[fake.index] -= 1

    actors = FakeActors(during=during)
    done = with_pool(actors, lambda pool: tasks(pool, 30), lanes=lanes)
    assert [x for x, _ in done] == list(range(30))
    assert most == {0: lanes, 1: lanes, 2: lanes}


def test_what_a_worker_finds_wrong_with_the_input_is_said_in_its_own_words():
    """Ray puts a worker's error into one of a class of both kinds, whose text is a traceback."""

    class RayTaskError(InputError):
        def __init__(self, cause: Exception) -> None:
            super().__init__("Traceback (most recent call last): …")
            self.cause = cause

    error = InputError("x.tokens holds the id 65535")

    async def fails(*_: Any) -> None:
        raise RayTaskError(error)

    for actors in (FakeActors(start=fails), FakeActors(during=fails)):
        with pytest.raises(InputError) as raised:
            with_pool(actors, lambda pool: tasks(pool, 1))
        assert raised.value is error


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_tasks_of_one_that_dies_are_the_next_and_it_is_replaced_once(lanes: int):
    order: list[Any] = []

    async def during(fake: Fake, x: Any) -> None:
        order.append(x)
        await turns(5)
        if fake.number == 0 and x in (0, 3):
            fake.alive = False

    actors = FakeActors(during=during)

    async def test(pool: Pool) -> Any:
        done = await tasks(pool, 12)
        await turns()
        return done, pool.live

    done, live = with_pool(actors, test, lanes=lanes)
    assert [x for x, _ in done] == list(range(12))
    assert live == 3 and len(actors.made) == 4
    assert order.index(0, 1) <= 3 * lanes + 1  # before those that were not begun
    assert (actors.count("worker_died"), actors.count("worker_joined")) == (1, 1)
    assert actors.count("share_recovered") == lanes
    assert actors.said[0] == ("worker_died", "worker 0 died; 2 of 3 go on")


def test_below_the_minimum_nothing_begins_and_it_goes_on_when_one_returns():
    begun: list[Any] = []
    gate = asyncio.Event()

    async def start(fake: Fake) -> None:
        if fake.number >= 3:
            await gate.wait()

    async def during(fake: Fake, x: Any) -> None:
        begun.append(x)
        fake.alive = fake.alive and fake.number > 1  # the first two die of their first task

    actors = FakeActors(start, during)

    async def test(pool: Pool) -> Any:
        all_done = asyncio.ensure_future(tasks(pool, 12))
        await turns(100)
        before = len(begun), pool.live
        gate.set()
        await all_done
        return before

    (before, live) = with_pool(actors, test, minimum=2)
    assert live == 1 and before <= 3
    assert len(begun) == 14  # two were begun twice
    waiting = [text for event, text in actors.said if "waiting" in text]
    assert waiting == ["worker 1 died; waiting: 1 of at least 2 workers are left"]
    assert actors.count("worker_joined") == 2


def test_a_replacement_may_fail_while_enough_are_left():
    async def start(fake: Fake) -> None:
        if fake.number >= 3:
            raise Died

    async def during(fake: Fake, x: Any) -> None:
        fake.alive = fake.alive and fake.number > 0

    actors = FakeActors(start, during)

    async def test(pool: Pool) -> Any:
        await tasks(pool, 6)
        await turns()
        return await tasks(pool, 6)

    assert len(with_pool(actors, test, minimum=2)) == 6
    assert len(actors.made) == 3 + TRIES
    assert actors.count("worker_failed") == TRIES + 1
    assert (
        actors.said[-1][1] == f"worker 0 could not be replaced: Worker 0 died {TRIES} times in a row while it started."
    )


@pytest.mark.parametrize("victims, later", [([0, 1], False), ([0, 1, 2], False), ([0, 1], True)])
def test_too_few_that_cannot_be_replaced_end_the_run(victims: list[int], later: bool):
    """All of them at once, or with the last only after the others were given up."""
    gate = asyncio.Event()

    async def start(fake: Fake) -> None:
        if fake.number >= 3:
            if later and fake.index == victims[-1]:
                await gate.wait()
            raise Died

    async def during(fake: Fake, x: Any) -> None:
        await turns(3)
        fake.alive = fake.alive and fake.number not in victims

    actors = FakeActors(start, during)

    async def test(pool: Pool) -> Any:
        working = asyncio.ensure_future(tasks(pool, 9))
        await turns(200)
        assert later != working.done()
        gate.set()
        with pytest.raises(CheckFailed, match=r"fewer than parameter_server\.min_workers 2") as failed:
            await working
        assert f"could not be replaced: Worker {victims[-1] if later else ''}" in str(failed.value)
        with pytest.raises(CheckFailed):
            await pool.run(lambda worker: worker.work(0))

    with_pool(actors, test, minimum=2)


def test_one_that_joins_late_saves_the_run():
    """A replacement was given up, but another is still on its way, and with it they are enough."""
    gate = asyncio.Event()

    async def start(fake: Fake) -> None:
        if fake.number >= 3 and fake.index == 0:
            raise Died
        if fake.number >= 3:
            await gate.wait()

    async def during(fake: Fake, x: Any) -> None:
        fake.alive = fake.alive and fake.number > 1

    actors = FakeActors(start, during)

    async def test(pool: Pool) -> Any:
        working = asyncio.ensure_future(tasks(pool, 9))
        await turns(100)
        assert not working.done() and pool.live == 1
        gate.set()
        return await working

    assert len(with_pool(actors, test, minimum=2)) == 9


@pytest.mark.parametrize(
    "silent, end", [(False, "died"), (True, r"did not answer within parameter_server\.worker_timeout_seconds 0\.1")]
)
def test_a_task_that_ends_whoever_begins_it_is_given_up(silent: bool, end: str):
    async def during(fake: Fake, x: Any) -> None:
        if silent and x == 5:
            await asyncio.sleep(60)
        fake.alive = fake.alive and x != 5

    actors = FakeActors(during=during)
    with pytest.raises(CheckFailed, match=f"^{LOSSES} workers were lost with one share of a batch: the last one {end}"):
        with_pool(actors, lambda pool: tasks(pool, 9), timeout_seconds=0.1 if silent else 20)
    assert actors.count("worker_died") == LOSSES


@pytest.mark.parametrize("lanes", [1, 2])
def test_one_that_does_not_answer_is_replaced(lanes: int):
    async def during(fake: Fake, x: Any) -> None:
        await (asyncio.sleep(60) if fake.number == 1 else turns(5))

    actors = FakeActors(during=during)
    assert len(with_pool(actors, lambda pool: tasks(pool, 9), lanes=lanes, timeout_seconds=0.25)) == 9
    within = f"{'2 × ' if lanes == 2 else ''}parameter_server.worker_timeout_seconds 0.25"
    assert actors.said[0] == ("worker_died", f"worker 1 did not answer within {within}; 2 of 3 go on")


def test_what_a_task_raises_is_for_the_one_who_gave_it():
    async def during(fake: Fake, x: Any) -> None:
        if x == 4:
            raise ZeroDivisionError

    actors = FakeActors(during=during)

    async def test(pool: Pool) -> Any:
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda worker: worker.work(4))
        return await tasks(pool, 4)

    assert len(with_pool(actors, test)) == 4
    assert not actors.said and len(actors.made) == 3


def test_a_task_that_is_not_wanted_any_more_is_not_begun():
    begun: list[Any] = []

    async def during(fake: Fake, x: Any) -> None:
        begun.append(x)
        await turns(3)

    async def test(pool: Pool) -> None:
        working = asyncio.ensure_future(tasks(pool, 9))
        await turns(2)
        working.cancel()
        await turns()
        assert await pool.run(lambda worker: worker.work("next")) in [("next", index) for index in range(3)]

    with_pool(FakeActors(during=during), test)
    assert begun == [0, 1, 2, "next"]


@pytest.mark.parametrize(
    "error, message", [(Died(), "Worker 1 died 3 times in a row"), (ValueError("no GPU"), "no GPU")]
)
def test_one_that_cannot_start_ends_the_run_and_the_others(error: Exception, message: str):
    async def start(fake: Fake) -> None:
        if fake.index == 1:
            raise error
        await asyncio.sleep(10)

    actors = FakeActors(start)
    with pytest.raises((CheckFailed, ValueError), match=message):
        with_pool(actors, lambda pool: tasks(pool, 1))
    assert len(actors.made) == (2 + TRIES if isinstance(error, Died) else 3)


def test_a_start_has_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """It may take longer than a share, and when it does not end at all, this is said."""
    actors = FakeActors(lambda fake: asyncio.sleep(0.3))
    assert len(with_pool(actors, lambda pool: tasks(pool, 4), timeout_seconds=0.1)) == 4 and not actors.said
    monkeypatch.setattr(pool_module, "START_SECONDS", 0.1)
    with pytest.raises(CheckFailed, match=f"Worker 0 did not answer within 0.1 s {TRIES} times in a row while it star"):
        with_pool(actors, lambda pool: tasks(pool, 4), count=1)
    assert actors.said == [("worker_failed", "worker 0 did not answer within 0.1 s while it started")] * TRIES
