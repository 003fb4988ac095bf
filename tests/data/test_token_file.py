import dataclasses

import numpy as np
import pytest
from test_tokenizers import write_tokenizer

from jaxpar.config import InputError
from jaxpar.data import token_file
from jaxpar.data.token_file import HEADER_BYTES, Header, open_token_file
from jaxpar.data.tokenize import tokenize_files
from jaxpar.data.tokenizers import ByteTokenizer, load_tokenizer


@pytest.fixture
def path(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"hello")
    (tmp_path / "b.txt").write_bytes(b"you")
    tokenize_files([f"{tmp_path}/*.txt"], tmp_path / "x.tokens")
    return tmp_path / "x.tokens"


def test_what_was_written_is_read(path):
    opened = open_token_file(path)
    assert opened.header == Header("uint16", 257, "byte", ByteTokenizer.hash, 256, 10, 2, 256)
    assert bytes(opened.tokens[:5].astype(np.uint8)) == b"hello" and opened.tokens[5] == opened.tokens[9] == 256
    assert opened.document_ends.tolist() == [6, 10]
    assert isinstance(opened.tokens, np.memmap) and opened.tokens.dtype == np.uint16
    assert not opened.tokens.flags.writeable
    opened.check(ByteTokenizer(), vocab_size=257)


def test_layout_of_the_file_is_what_the_docstring_says(path):
    content = path.read_bytes()
    assert content[:8] == b"JAXPARTK" and content[8:12] == (1).to_bytes(4, "little")
    assert content[4096:4106] == b"h\0e\0l\0l\0o\0" and len(content) == 4096 + 24 + 16


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_dtype_follows_the_vocabulary(tmp_path, monkeypatch, vocab_size, dtype):
    monkeypatch.setattr(ByteTokenizer, "vocab_size", vocab_size)
    monkeypatch.setattr(ByteTokenizer, "end_of_document", vocab_size - 1)
    (tmp_path / "a.txt").write_bytes(b"abc")
    tokenize_files([f"{tmp_path}/a.txt"], tmp_path / "x.tokens")
    opened = open_token_file(tmp_path / "x.tokens")
    assert opened.tokens.dtype == dtype and opened.tokens.tolist() == [97, 98, 99, vocab_size - 1]
    assert opened.document_ends.tolist() == [4]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (
            -1,
            r"is truncated: its header promises 10 tokens and 2 documents, which makes 4136 bytes, but the "
            r"file has 4135",
        ),
        (4100, r"is truncated: .* makes 4136 bytes, but the file has 4100. Copy it again .*`jaxpar tokenize`"),
        (100, r"is truncated: a header alone takes 4096 bytes, but the file has 100. Copy it again"),
        (4137, r"is too long: .* 4136 bytes, but the file has 4137"),
        (0, r"is not a token file: it begins with b'' and not with b'JAXPARTK'"),
    ],
)
def test_wrong_length_is_refused(path, size, message):
    with path.open("r+b") as file:
        file.truncate(size % 4136 if size < 0 else size)
    with pytest.raises(InputError, match=message):
        open_token_file(path)


def test_other_files_versions_and_damage_are_refused(path, monkeypatch):
    content = bytearray(path.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(token_file, "VERSION", 2)
        with pytest.raises(InputError, match=r"version 1 of the token file format; this jaxpar reads version 2"):
            open_token_file(path)
    path.write_bytes(content.replace(b'"uint16"', b'"objec6"'))
    with pytest.raises(InputError, match=r"damaged header \(dtype is objec6\)"):
        open_token_file(path)
    path.write_bytes(content.replace(b'"largest_token": 256', b'"largest_token": 257'))
    with pytest.raises(InputError, match=r"damaged header \(largest_token is 257, vocab_size 257\)"):
        open_token_file(path)
    path.write_bytes(content.replace(b'{"dtype"', b"{'dtype'"))
    with pytest.raises(InputError, match=r"damaged header"):
        open_token_file(path)
    path.write_bytes(b"import os\n" * 1000)
    with pytest.raises(InputError, match=r"not a token file: it begins with b'import o'.*Text files must not end in"):
        open_token_file(path)
    with pytest.raises(InputError, match=r"cannot read the token file .*gone.tokens: No such file"):
        open_token_file(path.with_name("gone.tokens"))


def test_file_without_tokens_is_refused(path):
    header = dataclasses.replace(open_token_file(path).header, tokens=0, documents=0)
    with path.open("wb") as file:
        header.write(file)
    assert path.stat().st_size == HEADER_BYTES
    with pytest.raises(InputError, match=r"x.tokens holds no tokens"):
        open_token_file(path)


def test_tokens_of_another_tokenizer_are_refused_naming_both(path, tmp_path):
    other = load_tokenizer(str(write_tokenizer(tmp_path)))
    with pytest.raises(InputError) as error:
        open_token_file(path).check(other, vocab_size=1000)
    message = str(error.value)
    assert f"made by the tokenizer byte (hash {ByteTokenizer.hash[:12]})" in message
    assert f"data.tokenizer is {other.name} (hash {other.hash[:12]})" in message
    assert "tokenize the text again" in message


def test_token_id_beyond_the_model_is_refused(path):
    with pytest.raises(
        InputError,
        match=r"holds the token id 256, but model.vocab_size=256 allows only ids < 256. Set .*vocab_size=257",
    ):
        open_token_file(path).check(ByteTokenizer(), vocab_size=256)
