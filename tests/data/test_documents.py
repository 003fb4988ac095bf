import json

import pytest

from jaxpar.config import InputError
from jaxpar.data import documents
from jaxpar.data.documents import read_pieces


@pytest.fixture
def short_pieces(monkeypatch):
    monkeypatch.setattr(documents, "PIECE_BYTES", 10)


def test_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo")
    assert list(read_pieces(path)) == [(b"one\ntwo", True, 7)]


def test_long_text_is_cut_after_lines(tmp_path, short_pieces):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\nthree and more\n")
    pieces = list(read_pieces(path))
    # The third has no line end within ten bytes. It gives up its last character, which may be an incomplete one.
    assert [piece.text for piece in pieces] == [b"one\ntwo\n", b"three and", b" more\n"]
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize("shift", range(10))
def test_long_line_is_never_cut_inside_a_character(tmp_path, short_pieces, shift):
    path = tmp_path / "a.txt"
    text = "x" * shift + "é€😀" * 20
    path.write_text(text, encoding="utf-8")
    pieces = list(read_pieces(path))
    assert len(pieces) > 10
    assert "".join(piece.text.decode("utf-8") for piece in pieces) == text


def test_bytes_that_are_no_text_come_through_whole(tmp_path, short_pieces):
    path = tmp_path / "a.bin"
    path.write_bytes(b"\x80" * 35)
    assert b"".join(piece.text for piece in read_pieces(path)) == b"\x80" * 35


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_reading_goes_on_after_any_piece(tmp_path, short_pieces, name):
    path = tmp_path / name
    lines = [json.dumps({"text": f"döcument {i} {'x' * i}"}) for i in range(9)]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    pieces = list(read_pieces(path))
    for done in range(len(pieces)):
        assert list(read_pieces(path, pieces[done].next_offset)) == pieces[done + 1 :]


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\ntwo", "id": 1}\n\n{"text": ""}\n{"text": "dr\u00e9i \\ud800"}', encoding="utf-8")
    pieces = list(read_pieces(path))
    assert [piece.text for piece in pieces] == [b"one\ntwo", "dréi ?".encode()]
    assert all(piece.ends_document for piece in pieces)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"body": "x", "id": 2}', "found the keys body, id"),
        (b"{}", r"found the keys \(none\)"),
        (b'{"text": 3}', "found a text of type int"),
        (b'["x"]', "found a value of type list"),
        (b'{"text": "x', "Unterminated string starting at .column 10"),
        (b'{"text": "\xff"}', "can't decode byte 0xff"),
    ],
)
def test_bad_json_line_is_named(tmp_path, line, problem):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(InputError, match=rf'a.jsonl, line 3: each line must be .* under the key "text"; .*{problem}'):
        list(read_pieces(path))


def test_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*gone.txt: No such file or directory"):
        list(read_pieces(tmp_path / "gone.txt"))
