"""Text files to one token file: what `jaxpar tokenize` runs."""

import errno
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from jaxpar.config import InputError
from jaxpar.data.documents import PIECE_BYTES, Piece, read_pieces
from jaxpar.data.inputs import expand
from jaxpar.data.token_file import VERSION, is_token_file
from jaxpar.data.token_writer import open_writer
from jaxpar.data.tokenizers import Tokenizer, load_tokenizer

BATCH_BYTES = 32 * PIECE_BYTES  # tokenized at once, on all cores; at most about half a gigabyte of memory (measured)
SAVE_BYTES = 16 << 20  # of input between two saved points: at most this much is done again after an interruption


def tokenize_files(inputs: Sequence[str], output: Path, tokenizer: str = "byte") -> dict[str, Any]:
    """Tokenizes text files into one token file, going on where an interrupted run with the same inputs stopped.

    The result depends only on the order of the files and on their contents. Memory is constant (see
    `documents.read_pieces`). Each document is followed by the tokenizer's end-of-document token; with a tokenizer that
    has none of `tokenizers.END_OF_DOCUMENT_NAMES`, documents are just joined. Progress goes to stderr.

    Args:
        inputs: Paths and globs (see `inputs.expand`): `.jsonl` with a document a line, else a document a file.
        output: The `.tokens` file to make. An older token file there is replaced at the end, in one step.
        tokenizer: `byte`, or the path of a `tokenizer.json`.

    Returns:
        A summary: `path`, `files`, `documents`, `tokens`, `bytes` (of input), `replaced` (invalid UTF-8 sequences that
        became U+FFFD), `resumed_tokens` (those that an interrupted run had made), `tokenizer`, `vocab_size`,
        `end_of_document`, `seconds`.

    Raises:
        InputError: An input does not exist or cannot be read, no input holds text, `output` is something other than a
            token file, or the disk is full.
    """
    if not inputs:
        raise InputError("jaxpar tokenize needs at least one text file or glob.")
    if output.is_dir() or (output.exists() and not is_token_file(output)):
        raise InputError(f"the output {output} exists and is not a token file; it is left as it is. Give another name.")
    return write_tokens(expand(inputs, "inputs"), output, load_tokenizer(tokenizer), replace=True)


def write_tokens(files: Sequence[Path], output: Path, tokenizer: Tokenizer, *, replace: bool) -> dict[str, Any]:
    """As `tokenize_files`, for files that exist.

    Args:
        files: The text files, in order.
        output: The `.tokens` file to make.
        tokenizer: The tokenizer.
        replace: Make it again if `output` exists; otherwise another process has made it, and that will do.

    Returns:
        The summary, empty when nothing was to be done.
    """
    started = time.monotonic()
    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    try:
        with open_writer(output, tokenizer, fingerprint(files, tokenizer), say) as writer:
            if output.exists() and not replace:
                writer.discard()
                return {}
            done = writer.progress
            resumed_tokens, saved_bytes = done.tokens, done.input_bytes
            with _progress_bar(console) as bar:
                task = bar.add_task(output.name, total=sum(file.stat().st_size for file in files))
                for batch in _batches(files, done.file, done.offset):
                    bar.update(task, completed=done.input_bytes)
                    arrays, replaced = tokenizer.encode_bytes([piece.text for _, piece in batch])
                    done.replaced += replaced
                    for (file, piece), ids in zip(batch, arrays, strict=True):
                        writer.append(ids)
                        if piece.ends_document:
                            writer.end_document()
                        done.input_bytes += piece.next_offset - (done.offset if file == done.file else 0)
                        done.file, done.offset = file, piece.next_offset
                    if done.input_bytes - saved_bytes >= SAVE_BYTES:
                        writer.save()
                        saved_bytes = done.input_bytes
                bar.update(task, completed=done.input_bytes)
            if done.tokens == 0:
                writer.discard()
                raise InputError(f"no tokens: there is no text in {_named(files)}.")
            header = writer.finish()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(
                f"the disk of {output} is full. Make room and run the same again: it goes on where it was."
            ) from error
        raise InputError(f"cannot write {output}: {error.strerror}.") from error
    return {
        "path": str(output),
        "files": len(files),
        "documents": header.documents,
        "tokens": header.tokens,
        "bytes": done.input_bytes,
        "replaced": done.replaced,
        "resumed_tokens": resumed_tokens,
        "tokenizer": header.tokenizer,
        "vocab_size": header.vocab_size,
        "end_of_document": header.end_of_document,
        "seconds": time.monotonic() - started,
    }


def fingerprint(files: Sequence[Path], tokenizer: Tokenizer) -> str:
    """A hash that changes when the list of files, the size or time of one of them, or the tokenizer changes."""
    listed = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([VERSION, PIECE_BYTES, tokenizer.hash, listed]).encode()).hexdigest()


def _batches(files: Sequence[Path], file: int, offset: int) -> Iterator[list[tuple[int, Piece]]]:
    """The pieces from `offset` in file number `file` on, each with its file's number, about `BATCH_BYTES` at a time."""
    batch, batch_bytes = [], 0
    for number in range(file, len(files)):
        for piece in read_pieces(files[number], offset if number == file else 0):
            batch.append((number, piece))
            batch_bytes += len(piece.text)
            if batch_bytes >= BATCH_BYTES:
                yield batch
                batch, batch_bytes = [], 0
    if batch:
        yield batch


def _progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)


def _named(files: Sequence[Path]) -> str:
    rest = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return ", ".join(str(file) for file in files[:3]) + rest
