"""Ray as this package uses it: starting or joining it, starting actors, and telling that one has died.

Ray comes with the extra `ray`, so it is imported inside functions alone, and this module works without it.
"""

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from ipaddress import ip_address
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from jaxpar.config import InputError

CONNECT_SECONDS = 5
"""How long the address may take to accept a connection."""
ANSWER_SECONDS = 18
"""How long finding the address, connecting and joining may take together. Ray itself would wait for 40 s."""

_REHEARSAL = """
import socket, sys
host, port, connect_seconds = sys.argv[1:]
try:
    socket.create_connection((host.strip("[]"), int(port)), timeout=float(connect_seconds)).close()
    import ray
    ray.init(address=f"{host}:{port}", log_to_driver=False)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(1)
"""


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """Have a Ray cluster inside the block: one started on this machine, or the one at the address.

    A cluster that is started listens on 127.0.0.1 alone, with Ray's own sizes: as many CPUs and GPUs as there are, and
    at most 30% of the memory for objects. It ends with the block, and with this process however that ends. What actors
    print goes to Ray's logs (`session_latest/logs` in its temporary folder), not to the terminal. A process that has
    Ray initialised already, a notebook for instance, keeps on using it, and has it afterwards.

    Call it in a thread that lives as long as the cluster is needed: Linux ends what a thread started when that ends.

    Args:
        address: `host:port` of the head of a cluster that `ray start` made, with a node of it on this machine. None
            starts one.

    Raises:
        InputError: where Ray is missing, or cannot be started or joined; within 20 s.
    """
    host_and_port = _host_and_port(address) if address is not None else None
    ray = _ray()
    if ray.is_initialized():
        yield
        return
    if host_and_port is not None:
        _rehearse_joining(*host_and_port)
    handler = signal.getsignal(signal.SIGTERM)
    with _no_orphans() if address is None else nullcontext():
        try:
            _initialise(ray, address)
            if threading.current_thread() is threading.main_thread() and handler is not None:
                signal.signal(signal.SIGTERM, handler)  # Ray puts its own in the place of the caller's
            yield
        finally:
            ray.shutdown()


def accelerators() -> int:
    """How many GPUs the machines of the cluster have together."""
    resources = _ray().cluster_resources()
    return int(resources["GPU"]) if "GPU" in resources else 0


def alive() -> bool:
    """Whether the cluster has this machine as a node. Without it no process can be started, nor called."""
    ray = _ray()
    here = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == here and node["Alive"] for node in ray.nodes())


def start_actor(cls: type, *args: Any, gpus: int = 0, max_concurrency: int = 1, **kwargs: Any) -> Any:
    """Start a process somewhere in the cluster that holds an instance of a plain class.

    The process counts as using no CPU, so that any number of them fit on a machine. Ray never starts it again and
    never repeats a call that failed: what the death of an actor means is for the caller to decide.

    Args:
        cls: the class. One that a script defines travels by value, one of a package is imported there.
        *args: the arguments of the class.
        gpus: how many GPUs of its machine are the actor's own. With 0 Ray hides none from it.
        max_concurrency: how many calls it works on at a time, in threads.
        **kwargs: the keyword arguments of the class.

    Returns:
        The actor's handle, at once: `handle.method.remote(...)` gives a reference, which can be awaited.
    """
    options = {"num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}
    actor = _ray().remote(**options, max_concurrency=max_concurrency, scheduling_strategy="SPREAD")(cls)
    return actor.remote(*args, **kwargs)


def died(error: BaseException) -> bool:
    """Whether a call failed because its actor's process has gone or cannot be reached.

    False when code raised: in the call, even if what it raised tells of another actor's death (Ray's `RayTaskError`,
    whose `cause` has that), or in the class's `__init__`.
    """
    errors = _ray().exceptions
    if isinstance(error, errors.RayTaskError):
        return False
    if isinstance(error, errors.RayActorError):
        return not cast(Any, error).actor_init_failed
    lost = (errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError, errors.ObjectLostError)
    return isinstance(error, lost)


def _ray() -> ModuleType:
    """Ray, quiet."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray would print this on stdout, in a dozen lines, for every actor that died. It reads the variable on import.
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "^A worker died or was killed"
    try:
        import ray
    except ImportError:
        raise InputError(
            "train.data_parallel parameter_server needs Ray, which is not installed. "
            'Run pip install "jaxpar[ray]", or use all_reduce.'
        ) from None
    return ray


def _initialise(ray: ModuleType, address: str | None) -> None:
    """Start Ray on loopback, or join it."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            with _loopback_alone():
                ray.init(address="local", include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except Exception as error:
        at = "on this machine" if address is None else f"at parameter_server.ray_address {address}"
        raise InputError(f"Ray {at} could not be used: {type(error).__name__}: {error}") from error
    if address is None and not ip_address(ray.util.get_node_ip_address()).is_loopback:
        raise InputError(f"Ray {ray.__version__} listens to the network, which a local run does not need. Use 2.60.")


@contextmanager
def _loopback_alone() -> Iterator[None]:
    """Have `ray.init` take 127.0.0.1 for this machine's address, and so listen nowhere else.

    Ray has no public way to say so on Linux (2.60): it puts the machine's address in the network in the place of a
    `_node_ip_address` of 127.0.0.1, and then listens on all. On macOS this constant is False already. The environment
    variable that sets it, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER, is read on import, which may be long past.
    """
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _no_orphans() -> Iterator[None]:
    """Have `reaper.py` see to it that nothing which starts in this block survives it, or this process."""
    if not sys.platform.startswith("linux"):  # Ray has a reaper of its own there
        yield
        return
    name, value = "JAXPAR_LOCAL_RAY", secrets.token_hex(16)
    reaper = subprocess.Popen(
        [sys.executable, "-IS", Path(__file__).with_name("reaper.py"), f"{name}={value}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # neither Ctrl-C nor what kills this process's group reaches it
    )
    os.environ[name] = value
    os.environ["SPT_NOENV"] = "1"  # keeps Ray's agents from writing their titles over the environment in /proc
    try:
        yield
    finally:
        del os.environ[name]
        reaper.communicate()


def _host_and_port(address: str) -> tuple[str, str]:
    """The two halves of `host:port`."""
    given = f"parameter_server.ray_address {address}"
    if address.startswith("ray://"):
        raise InputError(
            f"{given} is the address of a Ray client server, through which every call of a run would go. "
            "Start the run on a machine of the cluster, and give the head's address without ray://, "
            f"as in {address.removeprefix('ray://').rpartition(':')[0]}:6379."
        )
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(
            f"{given} must be host:port, as in 10.0.0.1:6379: what `ray start --head` says on the cluster's "
            "first machine. Without the key a Ray of its own is started on this machine."
        )
    return host, port


def _rehearse_joining(host: str, port: str) -> None:
    """Join from another process first: where no Ray answers, joining waits for long, and may end its process.

    Raises:
        InputError: with Ray's reason when that process fails or takes longer than `ANSWER_SECONDS`.
    """
    command = [sys.executable, "-c", _REHEARSAL, host, port, str(CONNECT_SECONDS)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired as error:
        reason, log = f"nothing that is Ray answered within {ANSWER_SECONDS} s", error.stderr
    else:
        if done.returncode == 0:
            return
        reason, log = done.stdout.decode(errors="replace").strip(), done.stderr
    last_line = (log or b"").decode(errors="replace").strip().rpartition("\n")[2].rstrip(".")
    raise InputError(
        f"parameter_server.ray_address {host}:{port} cannot be joined: {reason or 'Ray ended the process'}. "
        + (f"Ray's last words: {last_line}. " if last_line else "")
        + "Look with `ray status` on the cluster's first machine that it runs and which address it has, and that this "
        "machine is a node of it (`ray start --address`). A cluster with tokens needs RAY_AUTH_MODE=token and its "
        "token here as well. Without the key a Ray of its own is started on this machine."
    )
