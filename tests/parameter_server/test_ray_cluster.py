"""Starting, joining and leaving Ray, the actors' deaths, and what a user is told when it does not work."""

import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import TimeoutExpired
from types import SimpleNamespace

import pytest
from loopback import PROCESSES, needs_namespace, run_in_loopback, run_script

from jaxpar.config import InputError
from jaxpar.parameter_server import cluster as module
from jaxpar.parameter_server.cluster import cluster

LIFE = (
    "import asyncio, ctypes, fcntl, json, os, signal, socket, struct, subprocess, sys, time\n"
    + PROCESSES
    + '''
from jaxpar.parameter_server.cluster import accelerators, cluster, died, start_actor

def put_this_machine_in_a_network(address):
    """Another address on the loopback interface, and a route through it to everywhere, which leads nowhere."""
    internet = lambda ip: struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(ip))
    name = ctypes.create_string_buffer(b"lo")
    everywhere = internet("0.0.0.0")
    to, gateway, mask = 3 * [everywhere]
    route = struct.pack("@L16s16s16sHhLPhP", 0, to, gateway, mask, 1, 0, 0, 0, 0, ctypes.addressof(name))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8916, struct.pack("16s16s8x", b"lo:1", internet(address)))  # SIOCSIFADDR
        fcntl.ioctl(any_socket, 0x890B, route + bytes(64))  # SIOCADDRT
        any_socket.connect(("192.0.2.1", 53))
        assert any_socket.getsockname()[0] == address

def listening():
    """The addresses that some process listens on, in the kernel's hexadecimal words."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in open("/proc/net/" + name).readlines()[1:]]
    return [words[1].rpartition(":")[0] for words in lines if words[3] == "0A"]

class Actor:
    def __init__(self, fault=None):
        if fault is not None:
            raise fault
    def process(self):
        return os.getpid()
    def sleep(self):
        time.sleep(600)
    def fail(self):
        raise ValueError("on purpose")
    def ask(self, other):
        import ray
        return ray.get(other.process.remote())

async def failure(reference):
    """The name of the error, whether it is a death, and whether its cause is one."""
    try:
        await asyncio.wait_for(reference, 20)
    except Exception as error:
        return type(error).__name__, died(error), died(getattr(error, "cause", ValueError()))
    return "none"

async def deaths():
    victim, other = start_actor(Actor), start_actor(Actor)
    process = await victim.process.remote()
    pending = victim.sleep.remote()
    await asyncio.sleep(0.2)
    os.kill(process, signal.SIGKILL)
    seen = {"killed": await failure(pending), "dead": await failure(victim.process.remote())}
    seen["raised"] = await failure(other.fail.remote())
    seen["told"] = await failure(other.ask.remote(victim))
    seen["not made"] = await failure(start_actor(Actor, fault=ValueError("on purpose")).process.remote())
    return seen

JOIN = """
import sys
from jaxpar.config import InputError
from jaxpar.parameter_server import cluster as module
class Actor:
    def twice(self, x):
        return 2 * x
module.ANSWER_SECONDS = float(sys.argv[2])
try:
    with module.cluster(sys.argv[1]):
        import ray
        print(ray.get(module.start_actor(Actor).twice.remote(21)))
except InputError as error:
    print(error)
"""
def join(address, answer_seconds, **env):
    # Ray would look for 127.0.0.1 at 10.9.9.9, where this cluster, unlike one made with `ray start`, does not listen.
    env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    command = [sys.executable, "-c", JOIN, address, answer_seconds]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True).stdout

put_this_machine_in_a_network("10.9.9.9")
seen, asked = {}, []
handler = lambda number, frame: asked.append(number)
signal.signal(signal.SIGTERM, handler)
with cluster(None):
    import ray  # not before: Ray reads some variables on import
    seen["deaths"] = asyncio.run(deaths())
    seen["listening"] = listening()
    seen["gpus"] = accelerators()
    with cluster(None):
        actor = start_actor(Actor)
    stopped = ray.get(actor.process.remote())
    seen["CPUs taken"] = ray.cluster_resources()["CPU"] - ray.available_resources()["CPU"]
    address = ray.get_runtime_context().gcs_address
    seen["joined"] = join(address, "18"), join(address, "5", RAY_AUTH_TOKEN="wrong")
    seen["after joining"] = ray.get(actor.process.remote()) == stopped
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(stopped, signal.SIGSTOP)
seen["initialised"], seen["asked"], seen["left"] = ray.is_initialized(), asked, processes()
seen["marks"] = [name for name in os.environ if name.startswith("JAXPAR")]
print(json.dumps(seen))
'''
)

KILLED = (
    "import json, os, signal, subprocess, sys, time\n"
    + PROCESSES
    + '''
DRIVER = """
import os, signal, time
from jaxpar.parameter_server.cluster import cluster, start_actor
class Actor:
    def process(self):
        return os.getpid()
    def spin(self):
        while True:
            pass
with cluster(None):
    import ray
    busy, stopped = start_actor(Actor), start_actor(Actor)
    ray.get(busy.process.remote())
    os.kill(ray.get(stopped.process.remote()), signal.SIGSTOP)
    busy.spin.remote()
    print("ready", flush=True)
    time.sleep(600)
"""
driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
bystander = subprocess.Popen(["sleep", "600"])
driver.stdout.readline()
before = {process: name for process, name in processes().items() if process not in (driver.pid, bystander.pid)}
overwritten = [name for process, name in before.items() if open(f"/proc/{process}/environ").read(1) == chr(0)]
reaper_group = [os.getpgid(process) == process for process, name in before.items() if "reaper.py" in name]
driver.kill()
killed = time.monotonic()
while set(processes()) - {bystander.pid} and time.monotonic() < killed + 15:
    time.sleep(0.2)
left = processes()
print(json.dumps([len(before), overwritten, reaper_group, left.pop(bystander.pid), left]))
'''
)


@needs_namespace
def test_a_local_ray_from_start_to_end():
    done = run_script(LIFE, timeout_seconds=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    seen = json.loads(done.stdout)  # and nothing else is printed

    assert set(seen["listening"]) == {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, also as IPv6
    assert seen["gpus"] == seen["CPUs taken"] == 0
    assert seen["deaths"] == {
        "killed": ["ActorDiedError", True, False],
        "dead": ["ActorDiedError", True, False],
        "raised": ["RayTaskError(ValueError)", False, False],
        "told": ["RayTaskError(ActorDiedError)", False, True],
        "not made": ["ActorDiedError", False, False],
    }
    joined, refused = seen["joined"]
    assert joined == "42\n"
    assert "cannot be joined" in refused
    assert "token is missing or incorrect" in refused
    assert "RAY_AUTH_MODE=token" in refused
    assert seen["after joining"]
    assert seen["asked"] == [15]  # the handler of SIGTERM is still the caller's
    assert not seen["initialised"]
    assert seen["left"] == {}  # though an actor was stopped
    assert seen["marks"] == []


@needs_namespace
def test_nothing_of_a_local_ray_survives_the_process_that_started_it():
    done = run_script(KILLED, timeout_seconds=60)
    assert done.returncode == 0, done.stderr
    before, overwritten, reaper_group, bystander, left = json.loads(done.stdout)
    assert before >= 8
    assert overwritten == []  # where a title overwrote its environment, the reaper may not know a process
    assert reaper_group == [True]  # it outlives a signal to the driver's group
    assert bystander == "sleep 600"
    assert left == {}


@pytest.fixture
def no_ray_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray in this process that cannot do anything: what is tested comes before it is asked to."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of a socket that accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def refusal(address: str | None, within_seconds: float) -> str:
    """What the user reads."""
    start = time.monotonic()
    with pytest.raises(InputError) as caught, cluster(address):
        pytest.fail("it went in")
    assert time.monotonic() - start < within_seconds
    return str(caught.value)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for address in (None, "10.0.0.1:6379"):
        assert 'pip install "jaxpar[ray]"' in refusal(address, within_seconds=1)


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:port", "head:0", "head:65536", "http://head:80"])
def test_an_address_must_be_host_and_port(address: str, no_ray_here: None):
    assert f"parameter_server.ray_address {address} must be host:port" in refusal(address, within_seconds=1)


def test_a_client_address_is_refused_with_the_reason_and_the_right_form(no_ray_here: None):
    message = refusal("ray://10.0.0.1:10001", within_seconds=1)
    assert "Ray client" in message
    assert message.endswith("as in 10.0.0.1:6379.")


def test_nobody_listens(no_ray_here: None):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    message = refusal(address, within_seconds=10)
    assert f"parameter_server.ray_address {address} cannot be joined: ConnectionRefusedError" in message


def test_what_accepts_no_connection_is_given_up(monkeypatch: pytest.MonkeyPatch, no_ray_here: None):
    monkeypatch.setattr(module, "CONNECT_SECONDS", 1)
    with socket.socket() as server, socket.socket() as first:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        first.connect(server.getsockname())  # the queue is full now: Linux answers nobody else
        assert "cannot be joined: TimeoutError" in refusal(f"127.0.0.1:{server.getsockname()[1]}", within_seconds=8)


def test_something_that_is_not_ray_listens(monkeypatch: pytest.MonkeyPatch, listener: str, no_ray_here: None):
    assert module.ANSWER_SECONDS < 20  # Ray itself waits for 40 s
    monkeypatch.setattr(module, "ANSWER_SECONDS", 4)
    message = refusal(listener, within_seconds=8)
    assert f"{listener} cannot be joined: nothing that is Ray answered within 4 s" in message


@pytest.mark.parametrize(
    "joining, told",
    [
        ("raise RuntimeError('Version mismatch: the cluster has 3.12')", "RuntimeError: Version mismatch: the cluster"),
        (
            "import os, sys; print('Check failed', file=sys.stderr, flush=True); os.abort()",
            "cannot be joined: Ray ended the process. Ray's last words: Check failed. ",
        ),
    ],
)
def test_rays_reason_is_passed_on(
    joining: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listener: str, no_ray_here: None
):
    (tmp_path / "ray.py").write_text(f"def init(**options):\n    {joining}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert told in refusal(listener, within_seconds=10)


@needs_namespace
def test_a_command_in_loopback_reaches_nothing_else_and_leaves_nothing():
    program = """
import socket, subprocess, sys, time
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname())
try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
except OSError as error:
    print(error, flush=True)
subprocess.Popen(["sleep", sys.argv[1]], start_new_session=True)
time.sleep(float(sys.argv[2]))
sys.exit(3)
"""
    mark = "987654.3"
    done = run_in_loopback([sys.executable, "-c", program, mark, "0"], timeout_seconds=20)
    assert (done.returncode, done.stdout) == (3, "[Errno 101] Network is unreachable\n")
    with pytest.raises(TimeoutExpired) as caught:
        run_in_loopback([sys.executable, "-c", program, mark, "60"], timeout_seconds=1.5)
    assert caught.value.stdout == done.stdout
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert b"sleep\0" + mark.encode() + b"\0" not in commands
