"""The command line as a user runs it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


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


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where JAX keeps compiled programs, for tests that start the same run again; all pytest workers share it."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compile-cache"


@pytest.fixture
def quick_compiles(compile_cache: Path) -> Iterator[None]:
    """Compile in this process as `tiny_run.quick_compiles_env` has it done in others."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_disable_most_optimizations",
    )
    for values in ((str(compile_cache), 0, True), (None, 1, False)):
        for name, value in zip(names, values, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX looks at these settings only once
        if values[0]:
            yield
