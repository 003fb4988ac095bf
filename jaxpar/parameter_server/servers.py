"""The servers: what is asked of all of them at once, their snapshots, and the way back to one when a server died."""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.config import CheckFailed
from jaxpar.parameter_server.actors import Actors
from jaxpar.parameter_server.pool import TIMEOUT, TRIES, how_lost
from jaxpar.parameter_server.together import together
from jaxpar.parameter_server.worker import ServerLost

START_SECONDS = 600.0
"""What a server may take at least to start and take over a state, which includes importing JAX and compiling."""
WAYS_BACK = 10
"""How often servers may go back to one snapshot before they have written another."""


class Servers:
    """The servers of a run.

    Args:
        actors: what starts and ends them.
        count: how many.
        timeout_seconds: after which a server that has started and does not answer counts as dead.

    Attributes:
        handles: the actors.
        era: changes whenever servers take over another state; what was computed in an earlier era is of no use.
        snapshot: the version of the newest snapshot that all servers have on disk.
    """

    def __init__(self, actors: Actors, count: int, timeout_seconds: float) -> None:
        self._actors, self._count, self._timeout_seconds = actors, count, timeout_seconds
        self._start_seconds = max(START_SECONDS, timeout_seconds)
        self._numbers = itertools.count(1)
        self.handles: list[Any] = []
        self.era = self.snapshot = 0
        self._ways_back = 0

    def number(self) -> int:
        """The next number for an update or an era: servers ignore pushes with numbers below that of the era."""
        return next(self._numbers)

    async def start(self, version: int, states: Sequence[tuple[Any, Any]]) -> None:
        """Start the servers with their states, and have them write these to disk."""
        end = ""
        for _ in range(TRIES):
            self.handles = [self._actors.server(index) for index in range(self._count)]
            self.era = self.number()
            pairs = zip(self.handles, states, strict=True)
            try:
                loads = [server.load.remote(version, self.era, *state) for server, state in pairs]
                await self.answers(loads, self._start_seconds)
                await self.write_snapshot(version)
                return
            except ServerLost as lost:
                end = str(lost)
                self.kill()
        raise CheckFailed(f"Servers were lost {TRIES} times in a row while they started: the last one {end}.")

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on all servers."""
        return [getattr(server, method).remote(*args) for server in self.handles]

    async def all(self, method: str, *args: Any) -> list[Any]:
        """What a method gives on all servers."""
        return await self.answers(self.call(method, *args))

    async def answers(self, calls: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """What calls give.

        Args:
            calls: of any servers.
            seconds: that they may take; by default those after which a server counts as dead.

        Raises:
            ServerLost: a server died, or does not answer; the text says which of the two.
        """
        try:
            async with asyncio.timeout(seconds or self._timeout_seconds):
                return await together(calls)
        except Exception as error:
            if isinstance(error, TimeoutError) or self._actors.died(error):
                within = f"{seconds:g} s" if seconds else f"{TIMEOUT} {self._timeout_seconds:g}"
                raise ServerLost(how_lost(error, within)) from error
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

    async def go_back(self) -> tuple[list[int], str, float]:
        """Replace the servers that do not answer, and take all back to the newest snapshot that all have.

        Returns:
            Which were replaced, what had become of them, and after how many seconds all were back.

        Raises:
            CheckFailed: they die faster than they write snapshots.
        """
        began = time.monotonic()
        self._ways_back += 1
        lost: dict[int, str] = {}
        for _ in range(TRIES):
            seconds = [self._start_seconds if index in lost else None for index in range(self._count)]
            ends = await together(map(self._end, self.handles, seconds))
            ended = {index: end for index, end in enumerate(ends) if end}
            lost |= ended
            if self._ways_back > WAYS_BACK:
                raise CheckFailed(
                    f"Servers were lost {self._ways_back} times in a row before they had written another snapshot than "
                    f"that of version {self.snapshot}: {self._told(lost)}. Lower parameter_server.snapshot_every, "
                    f"raise a time that is too short, or look for what ends them."
                )
            for index in ended:
                self._actors.kill(self.handles[index])
                self.handles[index] = self._actors.server(index)
            self.era = self.number()
            restores = self.call("restore", self.snapshot, self.era)
            try:
                await self.answers(restores, self._start_seconds if lost else None)
                return sorted(lost), self._told(lost), time.monotonic() - began
            except ServerLost:
                continue
        raise CheckFailed(
            f"Servers were lost {TRIES} times in a row on the way back to version {self.snapshot}: {self._told(lost)}."
        )

    def kill(self) -> None:
        """End them all."""
        for server in self.handles:
            self._actors.kill(server)
        self.handles = []

    async def _end(self, server: Any, seconds: float | None) -> str:
        """What became of a server; nothing if it answers."""
        try:
            await self.answers([server.ping.remote()], seconds)
            return ""
        except ServerLost as lost:
            return str(lost)
        except Exception:
            return "failed"

    def _told(self, lost: Mapping[int, str]) -> str:
        """What became of servers, for people."""
        if not lost:  # a worker, which waits for half that time, or this process waited in vain for one
            return f"a server did not answer for a while ({TIMEOUT} {self._timeout_seconds:g})"
        return ", ".join(f"server {index} {end}" for index, end in sorted(lost.items()))
