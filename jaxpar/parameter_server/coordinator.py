"""Which gradients make which update, and what is done when a process dies.

sync: all shares of a batch make one update, so that a step is what it is with all-reduce. async: each share makes an
update of its own as soon as it is there, unless its parameters are too old by then. What is read and what is updated
is decided here alone, in one thread: a share of a batch is done once it is part of an update, is given out again until
then, and is given out again after servers went back to a snapshot from before it.
"""

import asyncio
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from jaxpar.config import CheckFailed, Config
from jaxpar.parameter_server.actors import Actors
from jaxpar.parameter_server.pool import TRIES, Pool, Report
from jaxpar.parameter_server.server import updates_per_step
from jaxpar.parameter_server.worker import Gradient, ServerLost

T = TypeVar("T")


class RolledBack(Exception):
    """The servers went back to a snapshot.

    Attributes:
        step: steps that are done there.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"rolled back to step {step}")
        self.step = step


@dataclass(frozen=True)
class Update:
    """An update that was made.

    Attributes:
        step: of which batch.
        parts: which parts of it.
        loss: mean over the tokens.
        tokens: how many.
        grad_norm: of the mean gradient.
        staleness: versions between the parameters it was computed with and those it was added to.
        skipped: updates so far that changed nothing, loss or gradient not being finite, this one included.
        skipped_in_a_row: of these the last ones.
        gradients: where the numbers come from.
    """

    step: int
    parts: tuple[int, ...]
    loss: float
    tokens: float
    grad_norm: float
    staleness: int
    skipped: int
    skipped_in_a_row: int
    gradients: tuple[Gradient, ...]


class Coordinator:
    """Makes the updates of a run.

    Args:
        config: resolved.
        actors: what runs servers and workers.
        first_step: steps done before.
        skipped: of these.
        report: where events go.
        on_step: called with all updates of a step, in the order of steps.
    """

    def __init__(
        self,
        config: Config,
        actors: Actors,
        first_step: int,
        skipped: int,
        report: Report,
        on_step: Callable[[int, Sequence[Update]], None],
    ) -> None:
        self._settings, self._actors, self._report, self._on_step = config.parameter_server, actors, report, on_step
        settings, self.per_step = self._settings, updates_per_step(config)
        self._asynchronous = settings.mode == "async"
        self._bound = settings.max_staleness if self._asynchronous else 0
        # A second task under way at each worker hides its pushes, and makes its gradients older.
        overlapping = self._asynchronous and settings.max_staleness >= 2 * settings.workers - 1
        self.lanes = 2 if overlapping else 1
        self.pool = Pool(
            actors, settings.workers, settings.min_workers, settings.worker_timeout_seconds, self.lanes, report
        )
        self._numbers = itertools.count(1)
        self._era = next(self._numbers)
        self.version = self._snapshot = first_step * self.per_step
        self._before = Update(first_step - 1, (), 0.0, 0.0, 0.0, 0, skipped * self.per_step, 0, ())
        self._made: dict[int, Update] = {}
        self._reported = first_step
        self._stuck = 0
        self._recovered_at: int | None = None
        self.staleness: Counter[int] = Counter()
        self.refused = 0

    async def start(self, states: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Start servers with their states, then workers; returns what the workers say of themselves."""
        self.servers = [self._actors.server(index) for index in range(self._settings.servers)]
        calls = [
            server.load.remote(self.version, self._era, params, opt_state)
            for server, (params, opt_state) in zip(self.servers, states, strict=True)
        ]
        await asyncio.gather(*calls)
        await self._all("snapshot")
        await self._all("snapshot_version", True)
        return await self.pool.start()

    async def steps(self, first: int, stop: int, asked_to_stop: Callable[[], Any] = lambda: False) -> int:
        """Make all updates of the steps `first .. stop - 1` that are not made.

        Args:
            first: number of the first, from 0.
            stop: number of the step after the last.
            asked_to_stop: when this is true no further step is begun.

        Returns:
            Steps done, all in all.

        Raises:
            RolledBack: a server died.
            CheckFailed: servers cannot be brought back.
        """
        if self._asynchronous:
            await self._guarded(self._apart(first, stop, asked_to_stop))
            return self._reported
        parts = tuple(range(self._settings.workers))
        for step in range(first, stop):
            if not asked_to_stop():
                await self._guarded(self._update(step, parts))
        return self._reported

    async def evaluate(self, batches: int) -> tuple[float, float]:
        """The loss summed over the validation tokens, and their number. No update may be under way."""
        seconds = self._settings.worker_timeout_seconds
        parts = itertools.product(range(batches), range(self._settings.workers))
        call = lambda batch, part: lambda worker: worker.evaluate.remote(self.servers, self._era, batch, part, seconds)
        sums = await self._guarded(_together(*(self.pool.run(call(batch, part)) for batch, part in parts)))
        loss, tokens = (sum(column) for column in zip(*sums, strict=True))
        return loss, tokens

    async def state(self) -> list[tuple[Any, Any]]:
        """Each server's parameters and optimizer state, all of one version. No update may be under way."""
        answers = await self._guarded(self._all("state"))
        assert {version for version, _, _ in answers} == {self.version}, "servers are apart"
        return [(params, opt_state) for _, params, opt_state in answers]

    async def snapshot(self) -> None:
        """Have all servers write a snapshot, and wait for it."""
        await self._guarded(self._all("snapshot", self._snapshot))
        await self._guarded(self._all("snapshot_version", True))
        self._snapshot = self.version

    async def busy_seconds(self) -> list[float]:
        """Each server's seconds spent on norms and updates."""
        return await self._guarded(self._all("busy_seconds"))

    async def close(self) -> None:
        """End all processes."""
        await self.pool.close()
        for server in self.servers:
            self._actors.kill(server)

    # ---------------------------------------------------------------- updates

    async def _apart(self, first: int, stop: int, asked_to_stop: Callable[[], Any]) -> None:
        """Each part of each batch makes an update of its own."""
        parts = itertools.product(range(first, stop), range(self._settings.workers))
        made = {(update.step, part) for update in self._made.values() for part in update.parts}
        todo = deque(part for part in parts if part not in made)
        left, unclaimed = set(todo), set(todo)
        under_way: Counter[tuple[int, int]] = Counter()

        def next_part() -> tuple[int, int] | None:
            if asked_to_stop() and todo:
                begun = max(step for step, _ in [*under_way, (first, 0)])
                while todo and todo[-1][0] > begun:
                    left.discard(todo.pop())
            if todo:
                return todo.popleft()
            # At the end a slow worker's parts are given to others too: the first one counts.
            return next((part for part, count in under_way.items() if part in unclaimed and count == 1), None)

        def claim(part: tuple[int, int]) -> bool:
            first = part in unclaimed
            unclaimed.discard(part)
            return first

        async def lane() -> None:
            while part := next_part():
                under_way[part] += 1
                while part in unclaimed:
                    if await self._update(part[0], (part[1],), partial(claim, part)):
                        left.discard(part)

        lanes = {asyncio.create_task(lane()) for _ in range(self.lanes * self._settings.workers)}
        try:
            while left:
                finished, lanes = await asyncio.wait(lanes, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    task.result()
        finally:
            await _cancel(lanes)

    async def _update(self, step: int, parts: tuple[int, ...], claim: Callable[[], bool] = lambda: True) -> bool:
        """Make an update of some parts of a batch; False if it is refused for its age, or another was made of them.

        Args:
            step: which batch.
            parts: which parts of it.
            claim: says whether no other update was made of them, and from then on to all others that one was.
        """
        numbers: list[int] = []
        made = None
        try:
            gradients = await self._gradients(numbers, step, parts)
            number = gradients[0].update
            squared = await self._all("norm", number, len(parts))
            # From here to the calls of apply nothing else runs, so that all servers get updates in the same order.
            staleness = self.version - min(g.base_version for g in gradients)
            if staleness > self._bound:
                self.refused += 1
                return False
            if not claim():
                return False
            made = number
            await self._apply(number, step, parts, gradients, math.sqrt(sum(squared)), staleness)
            return True
        finally:
            for number in numbers:
                if number != made:
                    self._call("drop", number)

    async def _gradients(self, numbers: list[int], step: int, parts: tuple[int, ...]) -> list[Gradient]:
        """Have the shares of an update computed and pushed; the numbers given to it are added to `numbers`.

        In async mode each try has a number of its own, so that no update is made of pushes of two workers, whose
        parameters would not be of the same age. In sync mode they are, and servers take the first.
        """
        seconds = self._settings.worker_timeout_seconds

        async def share(index: int, part: int) -> Gradient:
            async def call(worker: Any) -> Gradient:
                if self._asynchronous or not numbers:
                    numbers.append(next(self._numbers))
                return await worker.gradient.remote(self.servers, self._era, numbers[-1], index, step, part, seconds)

            for _ in range(TRIES):
                gradient = await self.pool.run(call)
                try:
                    await asyncio.wait_for(asyncio.gather(*gradient.pushed), seconds)
                    return gradient
                except Exception as error:  # its worker died while the push was on its way; or a server did
                    if not (isinstance(error, TimeoutError) or self._actors.died(error)):
                        raise
                    await self._all("ping")
            raise ServerLost(f"part {part} of step {step} could not be pushed")

        return await _together(*(share(index, part) for index, part in enumerate(parts)))

    async def _apply(
        self, number: int, step: int, parts: tuple[int, ...], gradients: list[Gradient], norm: float, staleness: int
    ) -> None:
        tokens = sum(g.tokens for g in gradients)
        loss = sum(g.loss * g.tokens for g in gradients) / max(tokens, 1)
        finite = math.isfinite(loss) and math.isfinite(norm)
        last = self._made.get(self.version, self._before)
        base_version = self.version - staleness
        self.version += 1
        calls = self._call("apply", number, self.version, base_version, norm, finite)
        if self.version % (self._settings.snapshot_every * self.per_step) == 0:
            calls += self._call("snapshot", self._snapshot)
        self.staleness[staleness] += 1
        self._made[self.version] = Update(
            step=step,
            parts=parts,
            loss=loss,
            tokens=tokens,
            grad_norm=norm,
            staleness=staleness,
            skipped=last.skipped + (not finite),
            skipped_in_a_row=0 if finite else last.skipped_in_a_row + 1,
            gradients=tuple(gradients),
        )
        answers = await self._answers(calls)
        on_disk = answers[: len(self.servers)]
        if all(version is not None for version in on_disk):
            self._snapshot = max(self._snapshot, min(on_disk))
        self._report_steps()

    def _report_steps(self) -> None:
        """Report the steps of which all updates are made, and forget what is not needed any more."""
        while len(updates := list(self._of_step(self._reported))) == self.per_step:
            self._reported += 1
            self._on_step(self._reported, updates)
        # Whole steps are kept: going back may take a part of one away.
        after = (update.step for version, update in self._made.items() if version > self._snapshot)
        oldest = min(after, default=self._reported)
        needed = lambda version, update: version >= self._snapshot or update.step >= oldest
        self._made = {version: update for version, update in self._made.items() if needed(version, update)}

    def _of_step(self, step: int) -> Iterator[Update]:
        return (update for update in self._made.values() if update.step == step)

    # ---------------------------------------------------------------- servers

    def _call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(server, method).remote(*args) for server in self.servers]

    async def _all(self, method: str, *args: Any) -> list[Any]:
        """What a method gives on all servers."""
        return await self._answers(self._call(method, *args))

    async def _answers(self, calls: list[Any]) -> list[Any]:
        try:
            return await asyncio.wait_for(asyncio.gather(*calls), self._settings.worker_timeout_seconds)
        except Exception as error:
            if isinstance(error, TimeoutError) or self._actors.died(error):
                raise ServerLost(str(error)) from error
            raise

    async def _guarded(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except ServerLost:
            await self._recover()
            raise RolledBack(self._reported) from None

    async def _recover(self) -> None:
        """Replace the servers that do not answer, and take all back to the newest snapshot that all have."""
        began = time.monotonic()
        self._stuck = self._stuck + 1 if self._recovered_at == self.version else 0
        if self._stuck >= TRIES:
            raise CheckFailed(f"servers died {self._stuck + 1} times in a row without an update in between.")
        for _ in range(TRIES):
            dead = [index for index, server in enumerate(self.servers) if not await self._answers_ping(server)]
            for index in dead:
                self._actors.kill(self.servers[index])
                self.servers[index] = self._actors.server(index)
            self._era = next(self._numbers)
            names = f"server{'s' * (len(dead) > 1)} {', '.join(map(str, dead))}" if dead else "a server for a while"
            lost = self.version - self._snapshot
            try:
                await self._all("restore", self._snapshot, self._era)
            except ServerLost:
                continue
            self._back_to(self._snapshot)
            seconds = time.monotonic() - began
            text = (
                f"{names} died; all servers are back at version {self.version}, {lost} updates before, "
                f"after {seconds:.2f} s"
            )
            self._report("server_restored", text, servers=dead, version=self.version, lost=lost, seconds=seconds)
            return
        raise CheckFailed(f"servers could not be restored to the snapshot of version {self._snapshot}.")

    def _back_to(self, version: int) -> None:
        self.version = self._recovered_at = version
        for gone in [v for v in self._made if v > version]:
            update = self._made.pop(gone)
            self.staleness[update.staleness] -= 1
            self._reported = min(self._reported, update.step)

    async def _answers_ping(self, server: Any) -> bool:
        try:
            await asyncio.wait_for(server.ping.remote(), self._settings.worker_timeout_seconds)
            return True
        except Exception:
            return False


async def _together(*work: Awaitable[Any]) -> list[Any]:
    """Wait for all; when one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Any) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
