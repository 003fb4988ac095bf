"""What servers do together: a way back to a snapshot, and what it means for workers."""

import asyncio
from pathlib import Path

import jax
import pytest
from in_process import InProcess
from whole_runs import tiny

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
    replaced, _ = asyncio.run(servers.go_back())
    assert replaced == [1] and servers.era > before
    assert pull() == first and pull() == 0
    assert all(server.instance.push(update, 0, 1.0, {}) is False for server in servers.handles)
