"""Writes a token file so that an interrupted run goes on where it was, and a reader never sees half a file.

The work is done in a folder `NAME.tokens.partial` beside the output: the tokens, the document ends and, saved now and
then, `progress.json`, which says how much of both is good and up to where the input has been read. Going on means
cutting both files back to that and reading on from there. When all is written, the tokens file becomes the output by
a rename, and the folder goes.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxpar.config import InputError
from jaxpar.data.token_file import HEADER_BYTES, Header
from jaxpar.data.tokenizers import Tokenizer
from jaxpar.data.windows import unknown


@dataclass
class Progress:
    """How far the work is.

    Attributes:
        fingerprint: Of the inputs and the tokenizer; progress made with another one is worthless.
        file: Index of the input file to read on in.
        offset: Where to read on in it, in bytes.
        input_bytes: Bytes read so far, all files together.
        replaced: Invalid UTF-8 sequences replaced so far.
        tokens: Tokens written.
        documents: Document ends written.
        document_start: Index of the first token of the document being written.
        largest_token: The largest id written, -1 before the first.
    """

    fingerprint: str
    file: int = 0
    offset: int = 0
    input_bytes: int = 0
    replaced: int = 0
    tokens: int = 0
    documents: int = 0
    document_start: int = 0
    largest_token: int = -1


class TokenWriter:
    """Appends tokens and document ends in constant memory. Made by `open_writer`.

    Args:
        folder: The existing folder to work in.
        output: The `.tokens` file to make.
        tokenizer: Whose tokens they are.
        progress: Where to go on; what is in the folder beyond it is cut off.
    """

    def __init__(self, folder: Path, output: Path, tokenizer: Tokenizer, progress: Progress):
        self.progress = progress
        self._folder = folder
        self._output = output
        self._tokenizer = tokenizer
        self._dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self._tokens = _open_at(folder / "tokens", HEADER_BYTES + progress.tokens * self._dtype.itemsize)
        self._ends = _open_at(folder / "document_ends", 8 * progress.documents)

    def append(self, ids: np.ndarray) -> None:
        """Writes the next tokens of the current document.

        Raises:
            InputError: The tokenizer gave an id outside its own vocabulary, which the file's dtype may not hold.
        """
        if (where := unknown(ids, self._tokenizer.vocab_size)) is not None:
            at = int(where.argmax())
            raise InputError(
                f"the tokenizer {self._tokenizer.name} gave the id {ids[at]} for token {self.progress.tokens + at} of "
                f"{self._output}, but its vocab_size={self._tokenizer.vocab_size} allows only ids from 0 to "
                f"{self._tokenizer.vocab_size - 1}. Mend the tokenizer."
            )
        if ids.size:
            self._tokens.write(ids.astype(self._dtype.newbyteorder("<")).tobytes())
            self.progress.tokens += ids.size
            self.progress.largest_token = max(self.progress.largest_token, int(ids.max()))

    def end_document(self) -> None:
        """Ends the current document, with the tokenizer's token for that if it has one. No document is empty."""
        progress = self.progress
        if progress.tokens == progress.document_start:
            return
        if self._tokenizer.end_of_document is not None:
            self.append(np.array([self._tokenizer.end_of_document]))
        self._ends.write(np.array([progress.tokens], "<u8").tobytes())
        progress.documents += 1
        progress.document_start = progress.tokens

    def save(self) -> None:
        """Makes `progress` the point to which an interrupted run returns, even after a power failure."""
        for file in (self._tokens, self._ends):
            file.flush()
            os.fsync(file.fileno())
        temporary = self._folder / "progress.json.new"
        with temporary.open("w") as file:
            json.dump(asdict(self.progress), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._folder / "progress.json")

    def finish(self) -> Header:
        """Completes the file, moves it to the output's place, and removes the folder.

        Returns:
            The header of the finished file.
        """
        progress, tokenizer = self.progress, self._tokenizer
        self.save()
        header = Header(
            dtype=self._dtype.name,
            vocab_size=tokenizer.vocab_size,
            tokenizer=tokenizer.name,
            tokenizer_hash=tokenizer.hash,
            end_of_document=tokenizer.end_of_document,
            tokens=progress.tokens,
            documents=progress.documents,
            largest_token=progress.largest_token,
        )
        header.write(self._tokens)
        self._tokens.truncate(header.documents_offset)
        self._tokens.seek(0, os.SEEK_END)
        self._ends.seek(0)
        shutil.copyfileobj(self._ends, self._tokens)
        self._tokens.flush()
        os.fsync(self._tokens.fileno())
        (self._folder / "tokens").replace(self._output)
        self.discard()
        return header

    def discard(self) -> None:
        """Removes what is left of the work."""
        self.close()
        for name in ("tokens", "document_ends", "progress.json", "lock"):  # the lock last: until then we are alone
            (self._folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # not empty: another process has come, or NFS still shows the lock that we hold open
            self._folder.rmdir()

    def close(self) -> None:
        """Closes the files. What was written after the last `save` will be written again."""
        self._tokens.close()
        self._ends.close()


def _open_at(path: Path, size: int) -> BinaryIO:
    """The file, cut or filled with zeros to `size` bytes, ready to write on after them and to read."""
    path.touch()
    file = path.open("r+b")
    file.truncate(size)
    file.seek(size)
    return file


@contextmanager
def open_writer(
    output: Path, tokenizer: Tokenizer, fingerprint: str, say: Callable[[str], None]
) -> Iterator[TokenWriter]:
    """A writer for `output` that goes on from what an interrupted run left, or says why it starts anew.

    Processes that want to write the same output take turns.

    Args:
        output: The `.tokens` file to make.
        tokenizer: Whose tokens they are.
        fingerprint: Changes when the inputs or the tokenizer change.
        say: Called with a line for people.

    Yields:
        The writer, at the point given by its `progress`.
    """
    folder = output.with_name(output.name + ".partial")
    with _alone_in(folder, say):
        progress = _saved_progress(folder, fingerprint, say)
        writer = TokenWriter(folder, output, tokenizer, progress)
        try:
            yield writer
        finally:
            writer.close()


def _saved_progress(folder: Path, fingerprint: str, say: Callable[[str], None]) -> Progress:
    try:
        progress = Progress(**json.loads((folder / "progress.json").read_text()))
    except FileNotFoundError:
        return Progress(fingerprint)
    except (ValueError, TypeError):  # of an older jaxpar
        progress = Progress("unreadable")
    if progress.fingerprint != fingerprint:
        say(f"{folder} is from an interrupted run with other inputs or another tokenizer: starting anew.")
        return Progress(fingerprint)
    say(f"Going on from an interrupted run: {progress.documents} documents, {progress.tokens} tokens are done.")
    return progress


@contextmanager
def _alone_in(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Makes `folder` and holds its lock, waiting for a process that has it. The kernel frees a dead process's lock."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = (folder / "lock").open("w")
        except FileNotFoundError:  # the process before us has just removed the folder
            continue
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"Waiting for another process that writes in {folder}.")
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                raise InputError(
                    f"{folder} is on a file system that cannot lock files ({error.strerror}). Run `jaxpar tokenize` "
                    "with an output on a local disk, copy the file, and give it as it is in data.train."
                ) from error
            try:
                ours = os.path.samestat(os.stat(lock.name), os.fstat(lock.fileno()))
            except FileNotFoundError:
                ours = False
            if ours:
                yield
                return
