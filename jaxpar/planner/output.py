"""Whether a file can be written, found out before the work and not after it."""

from pathlib import Path

from jaxpar.config import InputError


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


def first_line(file: Path) -> str:
    """The first line of a file; empty when there is none, or when there is no such file."""
    if not file.is_file():
        return ""
    with file.open(encoding="utf-8", errors="replace") as lines:
        return lines.readline(1000).rstrip("\n")
