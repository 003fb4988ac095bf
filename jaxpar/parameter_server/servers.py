"""The servers: what is asked of all of them at once, their snapshots, and the way back to one when a server died."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

from jaxpar.config import CheckFailed
from jaxpar.parameter_server.actors import Actors
from jaxpar.parameter_server.pool import TRIES
from jaxpar.parameter_server.together import together
from jaxpar.parameter_server.worker import ServerLost

WAYS_BACK = 10
"""How often servers may go back to one snapshot before they have written another."""


class Servers:
    """The servers of a run.

    Args:
        actors: what starts and ends them.
        count: how many.
        timeout_seconds: after which a server that does not answer counts as dead.

    Attributes:
        handles: the actors.
        era: changes whenever servers take over another state; what was computed in an earlier era is of no use.
        snapshot: the version of the newest snapshot that all servers have on disk.
    """

    def __init__(self, actors: Actors, count: int, timeout_seconds: float) -> None:
        self._actors, self._count, self._timeout_seconds = actors, count, timeout_seconds
        self._numbers = itertools.count(1)
        self.handles: list[Any] = []
        self.era = self.snapshot = 0
        self._ways_back = 0

    def number(self) -> int:
        """The next number for an update or an era: servers ignore pushes with numbers below that of the era."""
        return next(self._numbers)

    async def start(self, version: int, states: Sequence[tuple[Any, Any]]) -> None:
        """Start the servers with their states, and have them write these to disk."""
        for _ in range(TRIES):
            self.handles = [self._actors.server(index) for index in range(self._count)]
            self.era = self.number()
            pairs = zip(self.handles, states, strict=True)
            try:
                await self.answers([server.load.remote(version, self.era, *state) for server, state in pairs])
                await self.write_snapshot(version)
                return
            except ServerLost:
                self.kill()
        raise CheckFailed(f"parameter servers died {TRIES} times in a row while they started.")

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on all servers."""
        return [getattr(server, method).remote(*args) for server in self.handles]

    async def all(self, method: str, *args: Any) -> list[Any]:
        """What a method gives on all servers."""
        return await self.answers(self.call(method, *args))

    async def answers(self, calls: Sequence[Any]) -> list[Any]:
        """What calls give.

        Raises:
            ServerLost: a server died, or does not answer.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await together(calls)
        except Exception as error:
            if isinstance(error, TimeoutError) or self._actors.died(error):
                raise ServerLost(str(error)) from error
            raise

    async def write_snapshot(self, version: int) -> None:
        """Have all servers write their state, which is of this version, and wait for it."""
        await self.all("snapshot", self.snapshot)
        await self.all("snapshot_version", True)
        self.note_snapshot([version])

    def note_snapshot(self, on_disk: Sequence[int | None]) -> None:
        """Take notice of the servers' newest snapshots; None: one is being written."""
        versions = [version for version in on_disk if version is not None]
        if len(versions) == len(on_disk) and min(versions) > self.snapshot:
            self.snapshot, self._ways_back = min(versions), 0

    async def go_back(self) -> tuple[list[int], float]:
        """Replace the servers that do not answer, and take all back to the newest snapshot that all have.

        Returns:
            Which were replaced, and after how many seconds all were back.

        Raises:
            CheckFailed: they die faster than they write snapshots.
        """
        began = time.monotonic()
        self._ways_back += 1
        if self._ways_back > WAYS_BACK:
            raise CheckFailed(
                f"Servers died {self._ways_back} times in a row before they had written another snapshot than that of "
                f"version {self.snapshot}. Lower parameter_server.snapshot_every, or look for what ends them."
            )
        replaced: set[int] = set()
        for _ in range(TRIES):
            answering = await together(map(self._answers, self.handles))
            for index in (i for i, answers in enumerate(answering) if not answers):
                self._actors.kill(self.handles[index])
                self.handles[index] = self._actors.server(index)
                replaced.add(index)
            self.era = self.number()
            try:
                await self.all("restore", self.snapshot, self.era)
                return sorted(replaced), time.monotonic() - began
            except ServerLost:
                continue
        raise CheckFailed(f"Servers died {TRIES} times in a row on the way back to version {self.snapshot}.")

    def kill(self) -> None:
        """End them all."""
        for server in self.handles:
            self._actors.kill(server)
        self.handles = []

    async def _answers(self, server: Any) -> bool:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await server.ping.remote()
            return True
        except Exception:
            return False
