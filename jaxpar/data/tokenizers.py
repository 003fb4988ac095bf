"""Tokenizers: bytes, or any Hugging Face `tokenizer.json`.

A tokenizer is known by its *hash*, not by its name: token files carry the hash, and a model never reads tokens
that another tokenizer made.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxpar.config import InputError

# Tried in this order; the first that the vocabulary holds separates documents.
END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """What the rest of `jaxpar.data` asks of a tokenizer.

    Attributes:
        name: For people: `byte`, or the last two parts of the path of the `tokenizer.json`.
        hash: Hexadecimal SHA-256 of what defines the tokenizer; equal hashes mean equal tokens.
        vocab_size: Number of token ids; every id is in `0 .. vocab_size - 1`.
        end_of_document: The id written after each document, or None when the vocabulary has no such token.
    """

    name: str
    hash: str
    vocab_size: int
    end_of_document: int | None

    def encode(self, text: str) -> np.ndarray:
        """Token ids int32[n] of `text`, without special tokens added around it."""
        ...

    def encode_bytes(self, pieces: Sequence[bytes]) -> tuple[list[np.ndarray], int]:
        """Token ids of each UTF-8 piece, and how many invalid UTF-8 sequences were replaced by U+FFFD."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`, special tokens left out."""
        ...


class ByteTokenizer:
    """One token per byte: ids 0..255, and 256 at the end of a document. No text is invalid.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("né").tolist()
        [110, 195, 169]
        >>> tokenizer.decode([110, 195, 169, 256])
        'né'
    """

    name = "byte"
    hash = hashlib.sha256(b"jaxpar byte tokenizer: ids 0..255 are bytes, 256 ends a document").hexdigest()
    vocab_size = 257
    end_of_document: int | None = 256

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer.encode`."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_bytes(self, pieces: Sequence[bytes]) -> tuple[list[np.ndarray], int]:
        """See `Tokenizer.encode_bytes`. Bytes are kept as they are, so nothing is ever replaced."""
        return [np.frombuffer(piece, np.uint8) for piece in pieces], 0

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See `Tokenizer.decode`."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json`, run by the `tokenizers` library on all cores.

    Truncation and padding that the file may ask for are switched off, and no special tokens are added around a
    text. The written form of a special token *inside* a text becomes that token, as Hugging Face does by default.

    Args:
        path: The `tokenizer.json`.

    Raises:
        InputError: The file cannot be read as a tokenizer.
    """

    def __init__(self, path: Path):
        # Imported here: the byte tokenizer, and so the quickstart, do not need it.
        from tokenizers import Tokenizer as Implementation

        try:
            content = path.read_bytes()
            self._implementation = Implementation.from_buffer(content)
        except Exception as error:  # the library raises bare Exception for a file that it cannot parse
            raise InputError(
                f"data.tokenizer={path} cannot be read as a Hugging Face tokenizer.json: {error}. "
                "Give the path of a tokenizer.json, or `byte`."
            ) from error
        self._implementation.no_padding()
        self._implementation.no_truncation()
        vocabulary = self._implementation.get_vocab(with_added_tokens=True)
        self.name = "/".join(path.absolute().parts[-2:])
        self.hash = hashlib.sha256(content).hexdigest()
        # Not the number of entries: ids may have holes, and tables are indexed by id.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.end_of_document = next((vocabulary[name] for name in END_OF_DOCUMENT_NAMES if name in vocabulary), None)

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer.encode`."""
        return np.array(self._implementation.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_bytes(self, pieces: Sequence[bytes]) -> tuple[list[np.ndarray], int]:
        """See `Tokenizer.encode_bytes`."""
        decoded = [_decode_utf8(piece) for piece in pieces]
        encodings = self._implementation.encode_batch_fast([text for text, _ in decoded], add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings], sum(count for _, count in decoded)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See `Tokenizer.decode`."""
        return self._implementation.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Args:
        name: `byte`, the path of a `tokenizer.json`, or the folder that holds one.

    Returns:
        The tokenizer.

    Raises:
        InputError: There is no such file, or it is not a tokenizer.

    Example:
        >>> load_tokenizer("byte").vocab_size
        257
    """
    if name == "byte":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise InputError(
            f"data.tokenizer={name}: there is no file {path}. Give `byte`, or the path of a Hugging Face "
            "tokenizer.json."
        )
    return HuggingFaceTokenizer(path)


def _decode_utf8(piece: bytes) -> tuple[str, int]:
    """The text of `piece`, and how many invalid sequences were replaced."""
    try:
        return piece.decode("utf-8"), 0
    except UnicodeDecodeError:
        text = piece.decode("utf-8", errors="replace")
        return text, text.count("\ufffd") - piece.count("\ufffd".encode())
