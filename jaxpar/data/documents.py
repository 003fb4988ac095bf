"""Files to documents, a piece at a time, so that memory does not grow with the corpus.

A `.jsonl` file holds one document a line, under the key `text`; any other file is one document.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxpar.config import InputError

# A longer text is tokenized in pieces that end after a line, so that memory stays bounded. Part of the result: a
# subword tokenizer may split the text differently where two pieces meet, so this is a constant and not a setting.
PIECE_BYTES = 128 << 10


class Piece(NamedTuple):
    """Part of a document.

    Attributes:
        text: UTF-8, not checked; never empty.
        ends_document: No further piece of this document follows.
        next_offset: Where the file is read on after this piece, in bytes from its start.
    """

    text: bytes
    ends_document: bool
    next_offset: int


def read_pieces(path: Path, offset: int = 0) -> Iterator[Piece]:
    """The documents of a file, in order. Empty documents are passed over.

    Memory is bounded by `PIECE_BYTES` for a text file, by the longest line for a `.jsonl` file.

    Args:
        path: The file.
        offset: 0, or the `next_offset` of an earlier piece, to go on after that piece.

    Yields:
        Pieces; together they are the file's text.

    Raises:
        InputError: The file cannot be read, or a line of a `.jsonl` file is not an object with a text.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            yield from (_json_lines if path.suffix == ".jsonl" else _text)(path, file, offset)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from error


def _text(path: Path, file: BinaryIO, offset: int) -> Iterator[Piece]:
    size = os.fstat(file.fileno()).st_size  # fixed here: a log file may grow while it is read
    while offset < size:
        block = file.read(min(PIECE_BYTES, size - offset))
        if not block:
            raise InputError(f"{path} became shorter while it was read. Run again when nothing writes to it.")
        if offset + len(block) < size:
            block = block[: _end_of_piece(block)]
        offset += len(block)
        file.seek(offset)
        yield Piece(block, offset >= size, offset)


def _end_of_piece(block: bytes) -> int:
    """Where to end a piece: after the last line, or else not inside a UTF-8 character."""
    if end := block.rfind(b"\n") + 1:
        return end
    for end in range(len(block) - 1, max(len(block) - 4, 1) - 1, -1):
        if block[end] & 0b1100_0000 != 0b1000_0000:  # a byte that starts a character
            return end
    return len(block)


def _json_lines(path: Path, file: BinaryIO, offset: int) -> Iterator[Piece]:
    for line in file:
        text = _text_of_line(path, line, offset) if line.strip() else b""
        offset += len(line)
        if text:
            yield Piece(text, True, offset)


def _text_of_line(path: Path, line: bytes, offset: int) -> bytes:
    try:
        value = json.loads(line.rstrip())
        if isinstance(value, dict) and isinstance(value.get("text"), str):
            # JSON can spell half a surrogate pair, which no UTF-8 can: it becomes `?`.
            return value["text"].encode("utf-8", errors="replace")
        found = (
            f"the keys {', '.join(value) or '(none)'}"
            if isinstance(value, dict)
            else f"a value of type {type(value).__name__}"
        )
        if isinstance(value, dict) and "text" in value:
            found = f"a text of type {type(value['text']).__name__}"
        problem = f"found {found}"
    except json.JSONDecodeError as error:
        problem = f"{error.msg} (column {error.colno})"
    except UnicodeDecodeError as error:
        problem = str(error)
    raise InputError(
        f"{path}, line {_line_number(path, offset)}: each line must be a JSON object with its document as a string "
        f'under the key "text"; {problem}.'
    )


def _line_number(path: Path, offset: int) -> int:
    """The number, from 1, of the line that starts at `offset`. Counted only when there is an error to report."""
    lines = 1
    with path.open("rb") as file:
        while offset > 0 and (block := file.read(min(PIECE_BYTES, offset))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines
