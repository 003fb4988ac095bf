"""Servers and workers in the test's own process, called one call at a time as Ray actors are; they die when told to."""

import asyncio
import copy
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxpar.config import Config
from jaxpar.parameter_server.server import Server
from jaxpar.parameter_server.slices import Slices
from jaxpar.parameter_server.worker import ServerLost, Worker


class Died(Exception):
    """What a call to a dead process raises."""


class Answer:
    """What a call gave, or raised, for the one who awaits it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.error = None
        try:
            self.value = call()
        except Exception as error:
            self.error = error

    def get(self) -> Any:
        if self.error:
            raise self.error
        return self.value

    def __await__(self) -> Generator[Any, Any, Any]:
        yield from asyncio.sleep(0).__await__()
        return self.get()


class Actor:
    """A handle: `actor.method.remote(...)`."""

    def __init__(self, instance: Any, before_call: Callable[["Actor", str], None]) -> None:
        self.instance, self.alive, self._before_call = instance, True, before_call

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Answer:
            def call() -> Any:
                self._before_call(self, method)
                if not self.alive:
                    raise Died(method)
                return getattr(self.instance, method)(*args)

            return Answer(call)

        return type("Method", (), {"remote": staticmethod(remote)})


def get(answers: Any, timeout_seconds: float) -> Any:
    try:
        return [answer.get() if isinstance(answer, Answer) else answer for answer in answers]
    except Died as error:
        raise ServerLost from error


class InProcess:
    """`Actors` of this process. Workers are copies of one that has compiled and not worked yet.

    Args:
        config, slices, folder: see `RayActors`.
        before_call: called with each actor and method before the method, and may kill.
        worker: the class of the workers.
    """

    def __init__(
        self,
        config: Config,
        slices: Sequence[Slices],
        folder: Path,
        before_call: Callable[[Actor, str], None] = lambda actor, method: None,
        worker: type[Worker] = Worker,
    ) -> None:
        self.config, self.slices, self.folder, self.before_call, self.cls = config, slices, folder, before_call, worker
        self.servers: list[Actor] = []
        self.workers: list[Actor] = []
        self._new: Worker | None = None

    def server(self, index: int) -> Actor:
        server = Actor(Server(self.config, index, self.slices[index], str(self.folder)), self.before_call)
        self.servers.append(server)
        return server

    def worker(self, index: int) -> Actor:
        if self._new is None:
            self._new = self.cls(self.config, self.slices, str(self.folder.parent / "tokens"), get)
            self._ready = self._new.ready()
        made = copy.copy(self._new)
        made.ready = lambda: self._ready
        worker = Actor(made, self.before_call)
        self.workers.append(worker)
        return worker

    def kill(self, actor: Actor) -> None:
        actor.alive = False

    def alive(self) -> bool:
        return True

    def died(self, error: BaseException) -> bool:
        return isinstance(error, Died)


def same(a: Any, b: Any) -> bool:
    return all(bool((x == y).all()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
