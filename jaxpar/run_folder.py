"""The folder of a run: can it be used, and is the run that stands in it the one that this config continues?

| in it | what it is |
|---|---|
| `config.yaml` | the resolved config |
| `metrics.jsonl` | a line of JSON for each logged step |
| `start.txt` | what was printed at each start: layout, schedule, reduction and why |
| `checkpoints/` | see `jaxpar.checkpoint` |
| `tokens/` | text made into tokens |
| `lock` | which process trains there, or was the last to |
"""

import errno
import fcntl
import json
import os
import shlex
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import Checkpoints
from jaxpar.config import Config, InputError, blocks_resume, differences


def prepare(config: Config, run_dir: Path, accept_changes: bool) -> None:
    """Make the folder, or see that it can be used, before anything that takes long.

    Args:
        config: of the run that is to start or go on there.
        run_dir: the folder.
        accept_changes: go on with the run there although its config differs in what is trained.

    Raises:
        InputError: it cannot be written to; or it holds a run with another config: names the keys and how to go on.
    """
    _make(run_dir)
    if not accept_changes and (stored := _stored_config(run_dir)) is not None:
        _compare(stored, config, run_dir)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Let no other process train in the folder while in the block. The lock ends with the process, however that ends.

    Where the file system cannot lock files, nothing is locked.

    Raises:
        InputError: another process has the lock.
    """
    path = run_dir / "lock"
    try:
        file = path.open("ab+", buffering=0)  # which leaves the other one's words there
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}. Choose another train.run_dir.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read().decode().strip()
            raise InputError(
                f"train.run_dir = {run_dir} is in use: another process, {who}, trains there. Wait until it has ended, "
                f"or choose another train.run_dir."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS):
                raise
        with suppress(OSError):  # a full disk, for which others have better words
            file.truncate(0)
            file.write(f"{os.getpid()} on {socket.gethostname()}\n".encode())
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # closing would leave it to processes forked from this one


def write_config(config: Config, run_dir: Path) -> None:
    """Store the resolved config, in one step, so that no other process ever reads half of it."""
    written = run_dir / "config.yaml.tmp"
    try:
        written.write_text(config.to_yaml(), encoding="utf-8")
        os.replace(written, run_dir / "config.yaml")
    except OSError as error:
        raise InputError(f"{run_dir / 'config.yaml'} cannot be written: {error.strerror}.") from error


def add_start_report(lines: Sequence[str], run_dir: Path) -> None:
    """Add to `start.txt` what a start has printed."""
    with (run_dir / "start.txt").open("a", encoding="utf-8") as file:
        file.write("\n".join([*lines, "", ""]))


def _make(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(run_dir, os.W_OK | os.X_OK) else "it cannot be written to"
    except OSError as error:
        reason = "a file has that name" if run_dir.is_file() else f"{error.filename}: {error.strerror}"
    if reason:
        raise InputError(f"train.run_dir = {run_dir} cannot be used: {reason}. Choose another train.run_dir.")


def _stored_config(run_dir: Path) -> Config | None:
    """The config of the run that stands in a folder; None when no step has been made there."""
    path, metrics = run_dir / "config.yaml", run_dir / "metrics.jsonl"
    with Checkpoints(run_dir / "checkpoints", keep=1) as checkpoints:
        saved = checkpoints.latest_step() is not None
        if not saved and not (metrics.exists() and metrics.stat().st_size):
            return None
        try:
            if path.exists():
                return Config.from_yaml_text(path.read_text(encoding="utf-8"), origin=str(path))
            return Config.from_yaml_text(checkpoints.metadata().config_yaml) if saved else None
        except (OSError, ValueError) as error:
            reason = f"{path}: {error.strerror}" if isinstance(error, OSError) else f"{path}: not a text file in UTF-8"
            raise InputError(
                f"The config of the run in {run_dir} cannot be read.\n"
                f"{error if isinstance(error, InputError) else reason}\n"
                f"If the config given now is that run's, add --accept-changes, which writes it anew. To start afresh, "
                f"set another train.run_dir."
            ) from error


def _compare(stored: Config, config: Config, run_dir: Path) -> None:
    changed = {key: pair for key, pair in differences(stored, config).items() if blocks_resume(key)}
    if stored.optimizer.schedule == config.optimizer.schedule == "constant":
        changed.pop("optimizer.decay_steps", None)  # it has no effect
    if not changed:
        return
    lines = [f"{run_dir} holds a run with another config:"]
    lines += [f"- {key}: {json.dumps(old)} there, {json.dumps(new)} now" for key, (old, new) in sorted(changed.items())]
    if "optimizer.decay_steps" in changed and stored.optimizer.decay_steps == stored.train.steps:
        lines.append(
            "optimizer.decay_steps, the step at which the learning rate is at its lowest, is train.steps "
            "unless it is set."
        )
    back = dict.fromkeys(_override(stored.model_dump(mode="json"), key) for key in sorted(changed))
    raise InputError(
        "\n".join(lines) + f"\nTo continue that run as it was, add: {' '.join(back)}\n"
        f"To continue it with the new values, add --accept-changes. To start afresh, set another train.run_dir."
    )


def _override(values: Any, dotted: str) -> str:
    """The `key=value`, for a shell, that gives a key its stored value; a section that was null becomes null."""
    taken = []
    for name in dotted.split("."):
        if isinstance(values, dict):
            values = values[name]
            taken.append(name)
    return shlex.quote(f"{'.'.join(taken)}={json.dumps(values)}")
