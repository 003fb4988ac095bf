"""The `.tokens` format: a header, the tokens, and where each document ends.

    offset 0     magic `JAXPARTK`, version u32, length of the JSON u32, JSON, zeros up to byte 4096
    offset 4096  tokens, u16 if every id of the vocabulary fits and u32 otherwise
    then         zeros up to a multiple of 8, then one u64 a document: the index after its last token

All numbers are little-endian. The header has a fixed length so that it can be written last, when the counts are
known. The file is read through a memory map: opening is instant and memory is the kernel's page cache.
"""

import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxpar.config import InputError
from jaxpar.data.tokenizers import Tokenizer

MAGIC = b"JAXPARTK"
VERSION = 1
HEADER_BYTES = 4096
_PREFIX = struct.Struct("<8sII")


@dataclass(frozen=True)
class Header:
    """What a token file says about itself.

    Attributes:
        dtype: `uint16` or `uint32`.
        vocab_size: Number of ids of the tokenizer.
        tokenizer: The tokenizer's name, for people.
        tokenizer_hash: Hexadecimal SHA-256 that decides whether two tokenizers are the same.
        end_of_document: The id after each document, or None.
        tokens: Number of tokens, those that end documents included.
        documents: Number of documents.
        largest_token: The largest id that occurs, so that no reader need scan the file; -1 without tokens.
    """

    dtype: str
    vocab_size: int
    tokenizer: str
    tokenizer_hash: str
    end_of_document: int | None
    tokens: int
    documents: int
    largest_token: int

    def write(self, file: BinaryIO) -> None:
        """Writes the first `HEADER_BYTES` bytes of `file`."""
        content = json.dumps(asdict(self)).encode()
        packed = _PREFIX.pack(MAGIC, VERSION, len(content)) + content
        assert len(packed) <= HEADER_BYTES, "a tokenizer's name is a file name, and those are short"
        file.seek(0)
        file.write(packed.ljust(HEADER_BYTES, b"\0"))

    @property
    def documents_offset(self) -> int:
        """Where the document ends begin, in bytes."""
        end = HEADER_BYTES + self.tokens * np.dtype(self.dtype).itemsize
        return -(-end // 8) * 8

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return self.documents_offset + 8 * self.documents


@dataclass(frozen=True)
class TokenFile:
    """An open token file.

    Attributes:
        path: Where it is.
        header: What it says about itself.
        tokens: uint16[tokens] or uint32[tokens], memory-mapped.
        document_ends: uint64[documents], memory-mapped: document d is `tokens[document_ends[d-1]:document_ends[d]]`.
    """

    path: Path
    header: Header
    tokens: np.ndarray
    document_ends: np.ndarray

    def check(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Refuses a file that a model with this tokenizer and vocabulary must not read.

        Args:
            tokenizer: The tokenizer of the run (`data.tokenizer`).
            vocab_size: The model's vocabulary (`model.vocab_size`).

        Raises:
            InputError: The file is of another tokenizer, or holds an id that the model has no row for.
        """
        if self.header.tokenizer_hash != tokenizer.hash:
            raise InputError(
                f"{self.path} was made by the tokenizer {self.header.tokenizer} (hash "
                f"{self.header.tokenizer_hash[:12]}), but data.tokenizer is {tokenizer.name} (hash "
                f"{tokenizer.hash[:12]}). Set data.tokenizer to the tokenizer of the file, or tokenize the text again "
                "with `jaxpar tokenize --tokenizer`."
            )
        if self.header.largest_token >= vocab_size:
            raise InputError(
                f"{self.path} holds the token id {self.header.largest_token}, but model.vocab_size={vocab_size} allows "
                f"only ids < {vocab_size}. Set model.vocab_size={self.header.vocab_size}, the size of the vocabulary "
                f"of the tokenizer {self.header.tokenizer}."
            )


def open_token_file(path: Path) -> TokenFile:
    """Opens a `.tokens` file, having checked that it is one and that it is whole.

    Args:
        path: The file.

    Returns:
        Its header, and its arrays as read-only memory maps.

    Raises:
        InputError: Not a token file, another version of the format, not of the length that its header promises, or
            without tokens.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(HEADER_BYTES)
    except OSError as error:
        raise InputError(f"cannot read the token file {path}: {error.strerror}.") from error
    header = _parse(path, start)
    if size != header.file_bytes:
        raise InputError(
            f"{path} is {'truncated' if size < header.file_bytes else 'too long'}: its header promises "
            f"{header.tokens} tokens and {header.documents} documents, which makes {header.file_bytes} bytes, but the "
            f"file has {size}. Copy it again from where it is whole, or make it again with `jaxpar tokenize`."
        )
    if header.tokens == 0:
        raise InputError(f"{path} holds no tokens. Make it again with `jaxpar tokenize` from files that hold text.")
    tokens = np.memmap(path, np.dtype(header.dtype).newbyteorder("<"), "r", HEADER_BYTES, (header.tokens,))
    if header.documents == 0:  # nothing can be mapped
        return TokenFile(path, header, tokens, np.zeros(0, "<u8"))
    ends = np.memmap(path, "<u8", "r", header.documents_offset, (header.documents,))
    return TokenFile(path, header, tokens, ends)


def is_token_file(path: Path) -> bool:
    """Whether `path` exists and begins like a token file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _parse(path: Path, start: bytes) -> Header:
    """The header from the first `HEADER_BYTES` bytes of a file."""
    if not start.startswith(MAGIC):
        raise InputError(
            f"{path} is not a token file: it begins with {start[:8]!r} and not with {MAGIC!r}. "
            "Text files must not end in .tokens; token files are made by `jaxpar tokenize`."
        )
    if len(start) < HEADER_BYTES:
        raise InputError(
            f"{path} is truncated: a header alone takes {HEADER_BYTES} bytes, but the file has {len(start)}. "
            "Copy it again from where it is whole, or make it again with `jaxpar tokenize`."
        )
    _, version, length = _PREFIX.unpack_from(start)
    if version != VERSION:
        raise InputError(
            f"{path} has version {version} of the token file format; this jaxpar reads version {VERSION}. "
            "Make it again with this jaxpar's `jaxpar tokenize`, or install the jaxpar that made it."
        )
    try:
        header = Header(**json.loads(start[_PREFIX.size : _PREFIX.size + length]))
        if header.dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype is {header.dtype}")
        if not -1 <= header.largest_token < header.vocab_size:
            raise ValueError(f"largest_token is {header.largest_token}, vocab_size {header.vocab_size}")
        return header
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} has a damaged header ({error}). Make it again with `jaxpar tokenize`.") from error
