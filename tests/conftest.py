"""The command line as a user runs it."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def run_jaxpar() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `jaxpar ARGS...` in a process of its own; gives returncode, stdout and stderr."""
    command = Path(sys.executable).with_name("jaxpar")

    def run(
        args: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_seconds: float = 600,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [command, *args],
            env={**os.environ, **(env or {})},
            cwd=cwd,
            timeout=timeout_seconds,
            capture_output=True,
            text=True,
        )

    return run
