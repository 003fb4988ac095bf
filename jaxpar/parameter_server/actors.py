"""Servers and workers as processes: what the coordinator needs of them, and how Ray provides it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxpar.config import Config
from jaxpar.parameter_server import cluster
from jaxpar.parameter_server.server import Server
from jaxpar.parameter_server.slices import Slices
from jaxpar.parameter_server.worker import ServerLost, Worker
from jaxpar.step import MakeModel


class Actors(Protocol):
    """What runs servers and workers: Ray, or in tests this process.

    An actor's methods are called as `actor.method.remote(...)`, which gives something to await.
    """

    def server(self, index: int) -> Any:
        """Start server `index`."""
        ...

    def worker(self, index: int) -> Any:
        """Start worker `index`."""
        ...

    def kill(self, actor: Any) -> None:
        """End an actor's process, if it is still there."""
        ...

    def died(self, error: BaseException) -> bool:
        """Whether an error means that an actor's process is gone, rather than that its code raised something."""
        ...

    def alive(self) -> bool:
        """Whether what runs them is itself alive. It may take long, or raise something, when it is not."""
        ...


class RayActors:
    """Each server and worker is a Ray actor: a process somewhere in the cluster.

    Workers get GPUs of their own where the cluster has enough for all of them, and otherwise virtual CPU devices.

    Args:
        config: of the run.
        slices: what each server owns.
        folder: for the servers' files.
        run_dir: of the run, where its tokens are.
        make_model: see `Worker`.
        worker: the class of the workers.
        server: the class of the servers.
    """

    def __init__(
        self,
        config: Config,
        slices: Sequence[Slices],
        folder: Path,
        run_dir: Path,
        make_model: MakeModel | None = None,
        worker: type[Worker] = Worker,
        server: type[Server] = Server,
    ) -> None:
        self._config, self._slices, self._make_model = config, slices, make_model
        self._worker, self._server = worker, server
        self._folder, self._tokens = str(folder.absolute()), str((run_dir / "tokens").absolute())
        devices = config.mesh.data * config.mesh.pipe * config.mesh.tensor
        self.gpus = devices if cluster.accelerators() >= devices * config.workers else 0

    def server(self, index: int) -> Any:
        """Start server `index`."""
        import ray

        return cluster.start_actor(self._server, self._config, index, self._slices[index], self._folder, ray.put)

    def worker(self, index: int) -> Any:
        """Start worker `index`."""
        arguments = self._config, self._slices, self._tokens, of_servers, self._make_model
        return cluster.start_actor(self._worker, *arguments, gpus=self.gpus)

    def kill(self, actor: Any) -> None:
        """End an actor's process, if it is still there."""
        import ray

        ray.kill(actor)

    def died(self, error: BaseException) -> bool:
        """Whether an error means that an actor's process is gone."""
        return cluster.died(error)

    def alive(self) -> bool:
        """Whether this machine's part of the Ray cluster is alive."""
        return cluster.alive()


def of_servers(references: Any, timeout_seconds: float) -> Any:
    """Wait for what servers' methods gave back.

    Raises:
        ServerLost: a server died, or does not answer within `timeout_seconds`.
    """
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        return ray.get(references, timeout=timeout_seconds)
    except Exception as error:
        if isinstance(error, GetTimeoutError) or cluster.died(error):
            raise ServerLost(str(error)) from None
        raise
