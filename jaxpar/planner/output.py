"""Whether a file can be written, found out before the work and not after it."""

import hashlib
from pathlib import Path

from jaxpar.config import InputError

SEAL = "# A {kind} that jaxpar wrote, and replaces as long as it is unchanged: "
"""How the last line of a file begins that jaxpar may replace."""
PLAN, CLUSTER = "plan", "cluster"
"""Kinds of such files; one does not replace the other."""


def check_output(name: str, file: Path) -> None:
    """Make sure that a file can be written; one that is there keeps what it holds.

    Args:
        name: of the option that names it, for the error.
        file: that is to be written.

    Raises:
        InputError: when it cannot be written.
    """
    if not file.parent.is_dir():
        raise InputError(f"{name} {file}: there is no folder {file.parent}.")
    if file.is_dir():
        raise InputError(f"{name} {file}: is a folder, must be a file.")
    if file.exists() and not file.is_file():
        raise InputError(f"{name} {file}: must be an ordinary file.")
    new = not file.exists()
    try:
        file.open("ab").close()  # permissions do not tell: a file system may be read-only, or make no files
        if new:
            file.unlink()
    except OSError as error:
        raise InputError(f"{name} {file}: cannot be written: {error.strerror}.") from None


def sealed(text: str, kind: str) -> str:
    """A text with a last line by which it is known that nobody has changed it: `check_replaceable`."""
    return f"{text}{SEAL.format(kind=kind)}{_digest(text)}\n"


def check_replaceable(name: str, file: Path, kind: str) -> None:
    """Make sure that a file can be written, and that nothing is lost by it but what jaxpar wrote there before.

    Args:
        name: of the option that names it, for the error.
        file: that is to be written, with a text that is `sealed`.
        kind: of the text.

    Raises:
        InputError: when it cannot be written, or holds something else.
    """
    check_output(name, file)
    if not file.exists():
        return
    try:
        held = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{name} {file}: is there already, and cannot be read: {error.strerror}.") from None
    text, seal, digest = held.rpartition(SEAL.format(kind=kind))
    if not seal:
        raise InputError(
            f"{name} {file}: is there already, and is no {kind} that jaxpar wrote. Remove it, or name another."
        )
    if digest.strip() != _digest(text):
        raise InputError(f"{name} {file}: has been changed since jaxpar wrote it. Remove it, or name another.")


def check_cluster_file(file: Path) -> None:
    """The same of a cluster file, `--output FILE.yaml`."""
    if file.suffix not in (".yaml", ".yml"):
        raise InputError(f"--output {file}: must be a .yaml file.")
    check_replaceable("--output", file, CLUSTER)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
