"""Commands that run where there is no network but loopback, and of which nothing stays behind.

Linux namespaces do both. The command sees only its own processes; when it ends, or its time is up, the first process
of the namespace ends, and the kernel kills all others in it, stopped ones and those in other process groups too.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

TIME_IS_UP = 124  # as timeout(1) has it

# The first process in the namespace: brings loopback up, runs the command, and collects orphans, as init does. It
# watches the clock, because unshare waits for its end, which comes after that of all others.
# 0x8914 is SIOCSIFFLAGS, 0x41 is IFF_UP | IFF_RUNNING (linux/sockios.h, linux/if.h).
_INIT = f"""
import fcntl, os, signal, socket, struct, subprocess, sys
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 0x41))
signal.signal(signal.SIGALRM, lambda *_: os._exit({TIME_IS_UP}))
signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
command = subprocess.Popen(sys.argv[2:])
while (ended := os.wait())[0] != command.pid:
    pass
code = os.waitstatus_to_exitcode(ended[1])
sys.exit(code if code >= 0 else 128 - code)
"""

PROCESSES = '''
import os
from pathlib import Path
def processes():
    """What runs in the namespace besides its first process and this one."""
    names = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and int(folder.name) not in (1, os.getpid()):
                names[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\\0", b" ").decode().strip()
        except OSError:
            pass
    return names
'''
"""For scripts that run in loopback."""


def run_in_loopback(
    args: Sequence[str | Path],
    *,
    timeout_seconds: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command on CPU devices, with Ray's files in a folder that is deleted afterwards.

    Raises:
        subprocess.TimeoutExpired: after the time; nothing of the command runs any more.
    """
    ray_folder = tempfile.mkdtemp(prefix="jp-", dir="/tmp")  # short: names of Unix sockets have at most 107 letters
    try:
        done = subprocess.run(
            [*_unshare(), sys.executable, "-c", _INIT, str(timeout_seconds), *args],
            # With a token in the environment Ray writes none into the home.
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "RAY_TMPDIR": ray_folder,
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                **(env or {}),
            },
            cwd=cwd,
            capture_output=True,
            text=True,
        )
    finally:
        shutil.rmtree(ray_folder, ignore_errors=True)
    if done.returncode == TIME_IS_UP:
        raise subprocess.TimeoutExpired(done.args, timeout_seconds, done.stdout, done.stderr)
    return done


def run_script(
    source: str, *args: str | Path, timeout_seconds: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python script, given as text, in loopback."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(source)
        return run_in_loopback([sys.executable, script, *args], timeout_seconds=timeout_seconds, env=env)


def _unshare() -> list[str]:
    """The command that runs another one in namespaces of its own; killing it kills what runs there."""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *as_root, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


@cache
def _obstacle() -> str:
    """Why commands cannot run in loopback here; empty where they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    try:
        done = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, timeout=30)
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else f"no namespaces: {done.stderr.strip()}"


needs_namespace = pytest.mark.skipif(bool(_obstacle()), reason=_obstacle())
