"""What servers do together: a way back to a snapshot, and what it means for workers."""

import asyncio
from pathlib import Path
from typing import Any

import jax
import pytest
from in_process import Died, InProcess
from whole_runs import tiny

from jaxpar.config import CheckFailed
from jaxpar.parameter_server import servers as module
from jaxpar.parameter_server.servers import Servers
from jaxpar.parameter_server.whole import Whole

pytestmark = pytest.mark.usefixtures("quick_compiles")


def test_after_a_way_back_workers_pull_all_again_and_nothing_older_is_taken(tmp_path: Path):
    """A version may now be another than the one of the same number that a worker holds."""
    config = tiny(tmp_path, "train.data_parallel=parameter_server", "parameter_server.servers=2")
    whole, folder = Whole(config), tmp_path / "parameter_server"
    folder.mkdir()
    actors = InProcess(config, whole.slices, folder)
    servers = Servers(actors, 2, timeout_seconds=60)
    asyncio.run(servers.start(0, whole.parts(jax.device_get(whole.program.init()))))
    worker = actors.worker(0).instance
    pull = lambda: worker._pull(servers.handles, servers.era, 60, predicted=False)
    assert (first := pull()) > 0 and pull() == 0
    before, update = servers.era, servers.number()
    servers.handles[1].alive = False
    replaced, told, _ = asyncio.run(servers.go_back())
    assert replaced == [1] and told == "server 1 died" and servers.era > before
    assert pull() == first and pull() == 0
    assert all(server.instance.push(update, 0, 1.0, {}) is False for server in servers.handles)


class Slow:
    """A server that is busy for a while when it has been made, and answers then; it may die in a call."""

    def __init__(self, index: int, seconds: float) -> None:
        self.last_call, self.alive = "", True
        self.index, self.free = index, asyncio.get_running_loop().time() + seconds

    def __getattr__(self, method: str) -> Any:
        return type("Method", (), {"remote": lambda _, *args: self.answer(method)})()

    async def answer(self, method: str) -> int | None:
        self.alive = self.alive and method != self.last_call
        if not self.alive:
            raise Died
        await asyncio.sleep(self.free - asyncio.get_running_loop().time())
        return 0 if method == "snapshot_version" else None


class SlowActors:
    """`Actors` of `Slow` servers."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.killed = seconds, []

    def server(self, index: int) -> Slow:
        return Slow(index, self.seconds)

    def kill(self, actor: Slow) -> None:
        self.killed.append(actor.index)

    def died(self, error: BaseException) -> bool:
        return isinstance(error, Died)


def test_a_start_may_take_longer_than_an_answer():
    """At the beginning, and of a replacement, also while another dies; what is slow later counts as dead."""

    async def test() -> None:
        actors: Any = SlowActors(0.5)
        servers = Servers(actors, 2, timeout_seconds=0.2)
        await servers.start(0, [({}, {})] * 2)
        assert actors.killed == []
        silent = "server 1 did not answer within parameter_server.worker_timeout_seconds 0.2"
        for last_call, lost, told, tries in (("", [1], silent, 1), ("restore", [0, 1], f"server 0 died, {silent}", 2)):
            servers.handles[0].last_call = last_call
            servers.handles[1].free += 60
            before = servers.era
            assert (await servers.go_back())[:2] == (lost, told)
            assert servers.era - before == tries
        assert actors.killed == [1, 1, 0]

    asyncio.run(test())


@pytest.mark.parametrize(
    "start_seconds, timeout, within",
    [(0.1, 0.05, "0.1 s"), (0.01, 0.12, "0.12 s"), (60, 0.05, "parameter_server.worker_timeout_seconds 0.05")],
)
def test_a_start_that_does_not_end_says_in_which_time(
    start_seconds: float, timeout: float, within: str, monkeypatch: pytest.MonkeyPatch
):
    """While they start, or in the snapshot that follows."""
    monkeypatch.setattr(module, "START_SECONDS", start_seconds)

    async def never(servers: Servers, version: int) -> None:
        await servers.answers([asyncio.sleep(60)])

    async def test() -> None:
        actors: Any = SlowActors(60 if start_seconds < 1 else 0)
        await Servers(actors, 2, timeout_seconds=timeout).start(0, [({}, {})] * 2)

    monkeypatch.setattr(Servers, "write_snapshot", never)
    with pytest.raises(CheckFailed, match=f"3 times in a row while they started: the last one did not .* {within}"):
        asyncio.run(test())
