"""The workers: tasks to whoever is free, death noticed, the dead one's task given to another, a replacement started."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from jaxpar.config import CheckFailed, InputError
from jaxpar.parameter_server.actors import Actors
from jaxpar.parameter_server.together import cancel, together
from jaxpar.parameter_server.worker import Ready

START_SECONDS = 3600.0
"""The longest that a worker may take to start, which includes compiling."""
TRIES = 3
"""How often in a row the start of a process may fail."""
LOSSES = 10
"""How many workers may be lost with one task before it is given up."""

TIMEOUT = "parameter_server.worker_timeout_seconds"

Report = Callable[..., None]
"""`report(event, text, **numbers)`: tells people and the run's log."""


def how_lost(error: BaseException, within: str) -> str:
    """What became of a process whose call failed so; `within` says in words which time it had to answer."""
    return f"did not answer within {within}" if isinstance(error, TimeoutError) else "died"


def _cause(error: BaseException) -> BaseException:
    """What a worker found wrong with the input, without what Ray puts around it, whose text is a traceback."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, InputError) else error


@dataclass(eq=False)
class Task:
    """Something for one worker to do; done again by another if that one dies."""

    call: Callable[[Any], Awaitable[Any]]
    done: asyncio.Future[Any]
    losses: int = 0
    lost_at: float | None = None

    def fail(self, error: BaseException) -> None:
        """Let the one who waits for it know, if somebody does."""
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(eq=False)
class Member:
    """A worker that works."""

    index: int
    actor: Any
    lanes: set[asyncio.Task[None]] = field(default_factory=set)


class Pool:
    """The workers of a run.

    Args:
        actors: what starts and ends them.
        count: how many there should be.
        minimum: with fewer nothing is begun.
        timeout_seconds: a worker that does not answer for so long with one task counts as dead.
        lanes: tasks that a worker has at a time; it does one after the other, so the second is there to begin with.
        report: where events go.
    """

    def __init__(
        self, actors: Actors, count: int, minimum: int, timeout_seconds: float, lanes: int, report: Report
    ) -> None:
        self._actors, self._count, self._minimum, self._report = actors, count, minimum, report
        self._timeout_seconds, self._lanes = timeout_seconds * lanes, lanes
        self._within = f"{f'{lanes} × ' * (lanes > 1)}{TIMEOUT} {timeout_seconds:g}"
        self._queue: deque[Task] = deque()
        self._changed = asyncio.Condition()
        self._members: dict[int, Member] = {}
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._failure: str | None = None

    @property
    def live(self) -> int:
        """Workers that work now."""
        return len(self._members)

    async def start(self) -> list[Ready]:
        """Start all workers and wait for them.

        Raises:
            CheckFailed: one of them died while it started, several times in a row.
        """
        return await together(self._join(index) for index in range(self._count))

    async def run(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """What a call on some worker gives, however many workers die on the way.

        Raises:
            CheckFailed: too few workers are left, or one after the other died of it.
        """
        task = Task(call, asyncio.get_running_loop().create_future())
        async with self._changed:
            self._queue.append(task)
            self._changed.notify_all()
        self._give_up_if_too_few()
        return await task.done  # which is cancelled when this is

    async def close(self) -> None:
        """End all workers."""
        members, self._members = self._members, {}
        await cancel([*self._starting.values(), *(lane for member in members.values() for lane in member.lanes)])
        for member in members.values():
            self._actors.kill(member.actor)

    async def _join(self, index: int) -> Ready:
        """Start a worker and take it in."""
        end = ""
        for _ in range(TRIES):
            actor = self._actors.worker(index)
            try:
                async with asyncio.timeout(START_SECONDS):
                    ready: Ready = await actor.ready.remote()
                async with self._changed:
                    member = self._members[index] = Member(index, actor)
                    self._changed.notify_all()
            except BaseException as error:
                self._actors.kill(actor)
                if not self._gone(error):
                    raise _cause(error) from None
                end = how_lost(error, f"{START_SECONDS:g} s")
                self._report("worker_failed", f"worker {index} {end} while it started", index=index)
                continue
            member.lanes = {asyncio.create_task(self._attend(member)) for _ in range(self._lanes)}
            return ready
        raise CheckFailed(f"Worker {index} {end} {TRIES} times in a row while it started.")

    async def _attend(self, member: Member) -> None:
        """Give a worker one task after the other, until it dies."""
        works = lambda: self._members.get(member.index) is member
        may_begin = lambda: self._queue and self.live >= self._minimum
        while works():
            async with self._changed:
                await self._changed.wait_for(may_begin)
                if not works():
                    return
                task = self._queue.popleft()
            if task.done.done():
                continue
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    result = await task.call(member.actor)
            except Exception as error:
                if self._gone(error):
                    await self._lost(member, task, error)
                else:
                    task.fail(_cause(error))
                continue
            if not task.done.done():
                task.done.set_result(result)
                if task.lost_at is not None:
                    seconds = time.monotonic() - task.lost_at
                    text = f"what it was doing was done by worker {member.index}, {seconds:.2f} s later"
                    self._report("share_recovered", text, index=member.index, seconds=seconds)

    def _gone(self, error: BaseException) -> bool:
        return isinstance(error, TimeoutError) or self._actors.died(error)

    async def _lost(self, member: Member, task: Task, error: BaseException) -> None:
        """A worker is gone: its task is the next, and another worker is started in its place."""
        async with self._changed:
            if not task.done.done():
                task.losses, task.lost_at = task.losses + 1, time.monotonic()
                if task.losses < LOSSES:
                    self._queue.appendleft(task)
                else:
                    end = how_lost(error, self._within)
                    task.fail(CheckFailed(f"{LOSSES} workers were lost with one share of a batch: the last one {end}."))
            first = self._members.get(member.index) is member  # of its lanes to see it
            if first:
                del self._members[member.index]
                self._starting[member.index] = asyncio.create_task(self._replace(member.index))
            self._changed.notify_all()
        self._give_up_if_too_few()
        if not first:
            return
        self._actors.kill(member.actor)
        text = f"worker {member.index} {how_lost(error, self._within)}; "
        if self.live < self._minimum:
            text += f"waiting: {self.live} of at least {self._minimum} workers are left"
        else:
            text += f"{self.live} of {self._count} go on"
        self._report("worker_died", text, index=member.index, live=self.live)

    async def _replace(self, index: int) -> None:
        began = time.monotonic()
        try:
            ready = await self._join(index)
        except Exception as error:
            text = f"worker {index} could not be replaced: {error}"
            self._report("worker_failed", text, index=index)
            self._failure = text
            return
        finally:
            del self._starting[index]
            self._give_up_if_too_few()
        seconds = time.monotonic() - began
        text = f"worker {index} has a replacement after {seconds:.1f} s; {self.live} of {self._count} work"
        process = ready.process
        self._report("worker_joined", text, index=index, live=self.live, seconds=seconds, process=process)

    def _give_up_if_too_few(self) -> None:
        """Fail all tasks when not enough workers are left, nor on their way."""
        if not self._failure or self.live + len(self._starting) >= self._minimum:
            return
        text = f"{self.live} workers are left, fewer than parameter_server.min_workers {self._minimum}"
        for task in self._queue:
            task.fail(CheckFailed(f"{self._failure}\n{text}."))
        self._queue.clear()
