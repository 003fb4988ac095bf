import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest
from test_tokenizers import TEXT, write_tokenizer

from jaxpar.config import InputError
from jaxpar.data import documents, token_writer, tokenize
from jaxpar.data.token_file import open_token_file
from jaxpar.data.tokenize import tokenize_files, write_tokens
from jaxpar.data.tokenizers import ByteTokenizer, load_tokenizer


@pytest.fixture
def small_amounts(monkeypatch):
    """So that small files make many pieces, batches and saved points."""
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)
    monkeypatch.setattr(tokenize, "BATCH_BYTES", 128)
    monkeypatch.setattr(tokenize, "SAVE_BYTES", 200)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.txt").write_text(TEXT[i:] + f"file {i}\n", encoding="utf-8")
    (folder / "empty.txt").write_text("")
    with (folder / "more.jsonl").open("w") as file:
        for i in range(20):
            file.write(json.dumps({"text": TEXT[: 3 * i]}) + "\n")
    return folder


def documents_of(corpus):
    texts = [(corpus / f"{i}.txt").read_text(encoding="utf-8") for i in range(5)]
    return texts + [TEXT[: 3 * i] for i in range(1, 20)]


def inputs(corpus):
    return [f"{corpus}/*.txt", f"{corpus}/*.jsonl"]


def decoded(path, tokenizer):
    opened = open_token_file(path)
    pieces = np.split(opened.tokens, opened.document_ends)
    assert pieces.pop().size == 0
    assert all(piece[-1] == tokenizer.end_of_document for piece in pieces)
    return [tokenizer.decode(piece) for piece in pieces]


@pytest.mark.parametrize("kind", ["byte", "json"])
def test_documents_come_back(corpus, tmp_path, small_amounts, kind):
    name = "byte" if kind == "byte" else str(write_tokenizer(tmp_path))
    tokenizer = load_tokenizer(name)
    summary = tokenize_files(inputs(corpus), tmp_path / "out" / "x.tokens", name)
    assert decoded(tmp_path / "out" / "x.tokens", tokenizer) == documents_of(corpus)
    assert os.listdir(tmp_path / "out") == ["x.tokens"]
    header = open_token_file(tmp_path / "out" / "x.tokens").header
    assert summary.pop("seconds") > 0
    assert summary == {
        "path": str(tmp_path / "out" / "x.tokens"),
        "files": 7,
        "documents": 24,
        "tokens": header.tokens,
        "bytes": sum(file.stat().st_size for file in corpus.iterdir()),
        "replaced": 0,
        "resumed_tokens": 0,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
    }


def test_pieces_are_the_same_however_they_are_batched(corpus, tmp_path, small_amounts, monkeypatch):
    name = str(write_tokenizer(tmp_path))
    tokenize_files(inputs(corpus), tmp_path / "a.tokens", name)
    monkeypatch.setattr(tokenize, "BATCH_BYTES", 1)
    tokenize_files(inputs(corpus), tmp_path / "b.tokens", name)
    assert (tmp_path / "a.tokens").read_bytes() == (tmp_path / "b.tokens").read_bytes()


def test_without_an_end_of_document_token_documents_are_joined(corpus, tmp_path):
    name = str(write_tokenizer(tmp_path, special_tokens=()))
    assert tokenize_files(inputs(corpus), tmp_path / "x.tokens", name)["end_of_document"] is None
    opened = open_token_file(tmp_path / "x.tokens")
    assert load_tokenizer(name).decode(opened.tokens) == "".join(documents_of(corpus))
    assert opened.document_ends.size == 24


def test_invalid_utf8_is_counted_for_a_tokenizer_of_text_and_kept_for_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"the \xff cat")
    name = str(write_tokenizer(tmp_path))
    assert tokenize_files([f"{tmp_path}/a.txt"], tmp_path / "x.tokens", name)["replaced"] == 1
    assert decoded(tmp_path / "x.tokens", load_tokenizer(name)) == ["the \ufffd cat"]
    assert tokenize_files([f"{tmp_path}/a.txt"], tmp_path / "y.tokens")["replaced"] == 0
    assert open_token_file(tmp_path / "y.tokens").tokens.tolist() == [*b"the \xff cat", 256]


class Stop(Exception):
    pass


def stop(*_):
    raise Stop


def interrupt_after(monkeypatch, calls):
    """Lets the tokenizer work `calls` times, and then fails once."""
    real = ByteTokenizer.encode_bytes
    left = [calls]

    def encode_bytes(self, pieces):
        left[0] -= 1
        if left[0] == -1:
            raise Stop
        return real(self, pieces)

    monkeypatch.setattr(ByteTokenizer, "encode_bytes", encode_bytes)


@pytest.mark.parametrize("calls", [0, 1, 3, 6, 9])
def test_interrupted_run_goes_on_to_the_same_bytes(corpus, tmp_path, small_amounts, monkeypatch, capsys, calls):
    whole, output = tmp_path / "whole.tokens", tmp_path / "x.tokens"
    expected = tokenize_files(inputs(corpus), whole)
    interrupt_after(monkeypatch, calls)
    with pytest.raises(Stop):
        tokenize_files(inputs(corpus), output)
    assert not output.exists()
    summary = tokenize_files(inputs(corpus), output)
    assert output.read_bytes() == whole.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["corpus", "whole.tokens", "x.tokens"]
    for key in ("documents", "tokens", "bytes"):
        assert summary[key] == expected[key]
    if calls >= 3:
        assert summary["resumed_tokens"] > 0
        assert "Going on from an interrupted run" in capsys.readouterr().err


def test_crash_while_finishing_loses_nothing(corpus, tmp_path, small_amounts, monkeypatch):
    whole, output = tmp_path / "whole.tokens", tmp_path / "x.tokens"
    tokens = tokenize_files(inputs(corpus), whole)["tokens"]
    with monkeypatch.context() as patch:
        patch.setattr(token_writer.shutil, "copyfileobj", stop)
        with pytest.raises(Stop):
            tokenize_files(inputs(corpus), output)
    assert tokenize_files(inputs(corpus), output)["resumed_tokens"] == tokens
    assert output.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("change", ["file", "list", "tokenizer"])
def test_changed_inputs_start_anew_and_say_so(corpus, tmp_path, small_amounts, monkeypatch, capsys, change):
    output, name, files = tmp_path / "x.tokens", "byte", inputs(corpus)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 6)
        with pytest.raises(Stop):
            tokenize_files(files, output)
    if change == "file":
        (corpus / "0.txt").write_text("other")
    elif change == "list":
        files.reverse()
    else:
        name = str(write_tokenizer(tmp_path))
    assert tokenize_files(files, output, name)["resumed_tokens"] == 0
    assert "from an interrupted run with other inputs or another tokenizer: starting anew" in capsys.readouterr().err
    tokenize_files(files, tmp_path / "whole.tokens", name)
    assert output.read_bytes() == (tmp_path / "whole.tokens").read_bytes()


def test_killed_process_goes_on(corpus, tmp_path):
    """SIGKILL, so that no handler, buffer or lock of the process can help."""
    output = tmp_path / "x.tokens"
    program = f"""
import time
from jaxpar.data import documents, tokenize
from jaxpar.data.tokenizers import ByteTokenizer
documents.PIECE_BYTES, tokenize.BATCH_BYTES, tokenize.SAVE_BYTES = 64, 128, 200
real = ByteTokenizer.encode_bytes
ByteTokenizer.encode_bytes = lambda self, pieces: (time.sleep(0.05), real(self, pieces))[1]
tokenize.tokenize_files({inputs(corpus)!r}, __import__("pathlib").Path({str(output)!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    progress = tmp_path / "x.tokens.partial" / "progress.json"
    deadline = time.monotonic() + 60
    while not progress.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not output.exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_BYTES", 64)
        summary = tokenize_files(inputs(corpus), output)
        tokenize_files(inputs(corpus), tmp_path / "whole.tokens")
    assert 0 < summary["resumed_tokens"] < summary["tokens"]
    assert output.read_bytes() == (tmp_path / "whole.tokens").read_bytes()


def test_writers_of_one_output_take_turns(corpus, tmp_path, small_amounts, monkeypatch):
    """The second finds the work done, or does it again when it is to replace; never do both write at once."""
    output, tokenizer, at_work = tmp_path / "x.tokens", ByteTokenizer(), []
    real = ByteTokenizer.encode_bytes

    def encode_bytes(self, pieces):
        at_work.append(threading.get_ident())
        time.sleep(0.01)
        return real(self, pieces)

    monkeypatch.setattr(ByteTokenizer, "encode_bytes", encode_bytes)
    files = sorted(corpus.iterdir())
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(write_tokens(files, output, tokenizer, replace=False)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(at_work)) == 1 and sum(bool(result) for result in results) == 1 and len(results) == 4
    assert sorted(os.listdir(tmp_path)) == ["corpus", "x.tokens"]
    assert write_tokens(files, output, tokenizer, replace=True)["tokens"] == open_token_file(output).header.tokens


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    peaks = []
    (tmp_path / "warm.txt").write_text("x")
    tokenize_files([f"{tmp_path}/warm.txt"], tmp_path / "warm.tokens")
    for megabytes in (20, 60):
        path = tmp_path / f"{megabytes}.txt"
        path.write_bytes(b"some line of text that is 40 bytes long\n" * (megabytes * 25000))
        tracemalloc.start()
        tokenize_files([str(path)], tmp_path / "x.tokens")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0] < 16 << 20, peaks


def test_bad_inputs_are_refused(tmp_path, monkeypatch):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(InputError, match=r"no tokens: there is no text in .*empty.txt\."):
        tokenize_files([f"{tmp_path}/empty.txt"], tmp_path / "x.tokens")
    with pytest.raises(InputError, match=r"inputs: there is no file .*/b.txt. Did you mean .*/a.txt\?"):
        tokenize_files([f"{tmp_path}/b.txt"], tmp_path / "x.tokens")
    with pytest.raises(InputError, match=r"needs at least one text file or glob"):
        tokenize_files([], tmp_path / "x.tokens")
    for taken in ("a.txt", "."):
        with pytest.raises(InputError, match=r"the output .* exists and is not a token file; it is left as it is"):
            tokenize_files([f"{tmp_path}/a.txt"], tmp_path / taken)
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "empty.txt"]
    assert (tmp_path / "a.txt").read_text() == "a"


def test_full_disk_is_named_and_the_work_goes_on_later(corpus, tmp_path, small_amounts, monkeypatch):
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(token_writer.TokenWriter, "finish", full)
        with pytest.raises(InputError, match=r"the disk of .*x.tokens is full. Make room and run the same again"):
            tokenize_files(inputs(corpus), tmp_path / "x.tokens")
    assert tokenize_files(inputs(corpus), tmp_path / "x.tokens")["resumed_tokens"] > 0


def test_replacing_an_older_token_file(corpus, tmp_path):
    tokenize_files([f"{corpus}/0.txt"], tmp_path / "x.tokens")
    tokenize_files(inputs(corpus), tmp_path / "x.tokens")
    assert open_token_file(tmp_path / "x.tokens").header.documents == 24


def test_tokenizing_imports_no_jax():
    program = "import sys, jaxpar.data.tokenize, jaxpar.data.token_file; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize("bad", [-1, 257, 65536])  # the last would be 0 in the file
def test_an_id_outside_the_tokenizers_own_vocabulary_is_not_written(tmp_path, monkeypatch, bad):
    real = ByteTokenizer.encode_bytes

    def encode_bytes(self, pieces):
        arrays, replaced = real(self, pieces)
        return [np.where(ids == ord("z"), bad, ids.astype(np.int32)) for ids in arrays], replaced

    monkeypatch.setattr(ByteTokenizer, "encode_bytes", encode_bytes)
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("xyz")
    message = rf"the tokenizer byte gave the id {bad} for token 6 of .*/x.tokens, but its vocab_size=257 allows only"
    with pytest.raises(InputError, match=message):
        tokenize_files([f"{tmp_path}/*.txt"], tmp_path / "x.tokens")
    assert not (tmp_path / "x.tokens").exists()
