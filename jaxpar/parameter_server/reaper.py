"""A script that ends what is left of a local Ray when the process that started it has gone, or has shut Ray down.

Linux ends Ray's head with the process that started it, and the actors notice and leave. But Ray's agents were still
there a minute after a SIGKILL, and so was an actor that SIGSTOP had stopped (measured with Ray 2.60).

All that Ray starts inherits one environment variable, which nothing else has: the argument, `NAME=value`. The process
to watch holds the other end of standard input, which closes at the latest with its end.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 3
"""How long Ray's processes have to leave by themselves; actors in the middle of a computation took up to 2 s."""


def main(mark: str) -> None:
    """Wait for the end of input, then for the processes that have the mark, and end those that stay."""
    sys.stdin.read()
    deadline = time.monotonic() + GRACE_SECONDS
    while remaining := _marked(mark):
        if time.monotonic() > deadline:
            for process in remaining:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


def _marked(mark: str) -> list[int]:
    """The processes that run with this in their environment. Those of other users do not show theirs."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                processes.append(int(folder.name))
    return processes


if __name__ == "__main__":
    main(sys.argv[1])
