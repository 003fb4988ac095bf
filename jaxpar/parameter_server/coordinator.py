"""Which gradients make which update, and what is done when a process dies.

sync: all shares of a batch make one update, so that a step is what it is with all-reduce. async: each share makes an
update of its own as soon as it is there, unless its parameters are too old by then. What is read and what is updated
is decided here alone, in one thread: a share of a batch is done once it is part of an update, is given out again until
then, and is given out again after servers went back to a snapshot from before it.
"""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from jaxpar.config import Config
from jaxpar.parameter_server.actors import Actors
from jaxpar.parameter_server.pool import TRIES, Pool, Report
from jaxpar.parameter_server.server import updates_per_step
from jaxpar.parameter_server.servers import Servers
from jaxpar.parameter_server.shares import Shares
from jaxpar.parameter_server.together import cancel, together
from jaxpar.parameter_server.update import RolledBack, Update, means
from jaxpar.parameter_server.worker import Gradient, Ready, ServerLost

T = TypeVar("T")


class Coordinator:
    """Makes the updates of a run.

    Args:
        config: resolved.
        actors: what runs servers and workers.
        first_step: steps done before.
        skipped: of these, all and the last ones in a row.
        report: where events go.
        on_step: called with all updates of a step, in the order of steps.
    """

    def __init__(
        self,
        config: Config,
        actors: Actors,
        first_step: int,
        skipped: tuple[int, int],
        report: Report,
        on_step: Callable[[int, Sequence[Update]], None],
    ) -> None:
        self._actors, self._report, self._on_step = actors, report, on_step
        self._settings = settings = config.parameter_server
        self.per_step = updates_per_step(config)
        self.asynchronous = settings.mode == "async"
        self._bound = settings.max_staleness if self.asynchronous else 0
        # A second task under way at each worker hides its pushes, and makes its gradients older.
        overlapping = self.asynchronous and settings.max_staleness >= 2 * settings.workers - 1
        self.lanes = 2 if overlapping else 1
        seconds = settings.worker_timeout_seconds
        # A worker gives up waiting for a server before it counts as dead itself.
        self._server_seconds = seconds / 2
        self.pool = Pool(actors, settings.workers, settings.min_workers, seconds, self.lanes, report)
        self.servers = Servers(actors, settings.servers, seconds)
        self.version = first_step * self.per_step
        all_skipped, in_a_row = (count * self.per_step for count in skipped)
        self._before = Update(first_step - 1, (), 0.0, 0.0, 0, all_skipped, in_a_row, ())
        self._made: dict[int, Update] = {}
        self.reported = first_step
        self.staleness: Counter[int] = Counter()
        self.refused = 0

    @property
    def latest(self) -> Update:
        """The update that made the servers' version; before the first one it says what was skipped before."""
        return self._made.get(self.version, self._before)

    @property
    def between_steps(self) -> bool:
        """Whether the servers' version is the state after the step reported last."""
        return self.version == self.reported * self.per_step

    async def start(self, states: Sequence[tuple[Any, Any]]) -> list[Ready]:
        """Start servers with their states, then workers; returns what the workers say of themselves."""
        await self.servers.start(self.version, states)
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
        if self.asynchronous:
            await self._guarded(self._apart(first, stop, asked_to_stop))
            return self.reported
        parts = tuple(range(self._settings.workers))
        for step in range(first, stop):
            if not asked_to_stop():
                await self._guarded(self._update(step, parts))
        return self.reported

    async def evaluate(self, batches: int) -> tuple[float, float]:
        """The loss summed over the validation tokens, and their number. No update may be under way."""
        parts = itertools.product(range(batches), range(self._settings.workers))

        async def sums(batch: int, part: int) -> tuple[float, float]:
            servers, seconds = self.servers, self._server_seconds
            call = lambda worker: worker.evaluate.remote(servers.handles, servers.era, batch, part, seconds)
            return await self.pool.run(call)

        loss_and_tokens = await self._guarded(together(sums(*part) for part in parts))
        loss, tokens = (sum(column) for column in zip(*loss_and_tokens, strict=True))
        return loss, tokens

    async def state(self) -> list[tuple[Any, Any]]:
        """Each server's parameters and optimizer state, all of one version. No update may be under way."""
        answers = await self._guarded(self.servers.all("state"))
        assert {version for version, _, _ in answers} == {self.version}, "servers are apart"
        return [(params, opt_state) for _, params, opt_state in answers]

    async def snapshot(self) -> None:
        """Have all servers write a snapshot, and wait for it. No update may be under way."""
        await self._guarded(self.servers.write_snapshot(self.version))

    async def busy_seconds(self) -> list[float] | None:
        """Each server's seconds spent on norms and updates; None: one of them died just now."""
        try:
            return await self.servers.all("busy_seconds")
        except ServerLost:
            return None

    async def close(self) -> None:
        """End all processes."""
        await self.pool.close()
        self.servers.kill()

    # ---------------------------------------------------------------- updates

    async def _apart(self, first: int, stop: int, asked_to_stop: Callable[[], Any]) -> None:
        """Each part of each batch makes an update of its own."""
        made = {(update.step, part) for update in self._made.values() for part in update.parts}
        shares = Shares(first, stop, self._settings.workers, made, asked_to_stop)

        async def lane() -> None:
            while share := shares.begin():
                step, part = share
                while shares.open(share):
                    if await self._update(step, (part,), partial(shares.claim, share)):
                        shares.made(share)

        lanes = [asyncio.create_task(lane()) for _ in range(self.lanes * self._settings.workers)]
        working = set(lanes)
        try:
            while shares.left:
                finished, working = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    task.result()
        finally:
            await cancel(lanes)

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
            squared = await self.servers.all("norm", number, len(parts))
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
                    self.servers.call("drop", number)

    async def _gradients(self, numbers: list[int], step: int, parts: tuple[int, ...]) -> list[Gradient]:
        """Have the shares of an update computed and pushed; the numbers given to it are added to `numbers`.

        In async mode each try has a number of its own, so that no update is made of pushes of two workers, whose
        parameters would not be of the same age. In sync mode they are, and servers take the first.
        """
        servers, seconds = self.servers, self._server_seconds

        async def share(index: int, part: int) -> Gradient:
            def call(worker: Any) -> Awaitable[Gradient]:
                if self.asynchronous or not numbers:
                    numbers.append(servers.number())
                return worker.gradient.remote(servers.handles, servers.era, numbers[-1], index, step, part, seconds)

            for _ in range(TRIES):
                gradient = await self.pool.run(call)
                try:
                    await servers.answers(gradient.pushed)
                    return gradient
                except ServerLost:  # or its worker died while the push was on its way
                    await servers.all("ping")
            raise ServerLost(f"part {part} of step {step} could not be pushed")

        return await together(share(index, part) for index, part in enumerate(parts))

    async def _apply(
        self, number: int, step: int, parts: tuple[int, ...], gradients: list[Gradient], norm: float, staleness: int
    ) -> None:
        tokens = sum(g.tokens for g in gradients)
        finite = math.isfinite(means(gradients)["loss"]) and math.isfinite(norm)
        last = self.latest
        base_version = self.version - staleness
        self.version += 1
        calls = self.servers.call("apply", number, self.version, base_version, norm, finite)
        if self.version % (self._settings.snapshot_every * self.per_step) == 0:
            calls += self.servers.call("snapshot", self.servers.snapshot)
        self.staleness[staleness] += 1
        self._made[self.version] = Update(
            step=step,
            parts=parts,
            tokens=tokens,
            grad_norm=norm,
            staleness=staleness,
            skipped=last.skipped + (not finite),
            skipped_in_a_row=0 if finite else last.skipped_in_a_row + 1,
            gradients=tuple(gradients),
        )
        answers = await self.servers.answers(calls)
        self.servers.note_snapshot(answers[-self._settings.servers :])
        self._report_steps()

    def _report_steps(self) -> None:
        """Report the steps of which all updates are made, and forget what is not needed any more."""
        while len(updates := list(self._of_step(self.reported))) == self.per_step:
            self.reported += 1
            self._on_step(self.reported, updates)
        # Whole steps are kept: going back may take a part of one away.
        snapshot = self.servers.snapshot
        oldest = min([self.reported, *(update.step for version, update in self._made.items() if version > snapshot)])
        needed = lambda version, update: version >= snapshot or update.step >= oldest
        self._made = {version: update for version, update in self._made.items() if needed(version, update)}

    def _of_step(self, step: int) -> Iterator[Update]:
        return (update for update in self._made.values() if update.step == step)

    # ---------------------------------------------------------------- the way back

    async def _guarded(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except ServerLost:
            await self._go_back()
            raise RolledBack(self.reported) from None

    async def _go_back(self) -> None:
        replaced, told, seconds = await self.servers.go_back()
        lost, self.version = self.version - self.servers.snapshot, self.servers.snapshot
        for gone in [version for version in self._made if version > self.version]:
            update = self._made.pop(gone)
            self.staleness[update.staleness] -= 1
            self.reported = min(self.reported, update.step)
        text = f"{told}; all are back at version {self.version}, {lost} updates before, after {seconds:.2f} s"
        self._report("server_restored", text, servers=replaced, version=self.version, lost=lost, seconds=seconds)
