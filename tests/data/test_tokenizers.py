import hashlib

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxpar.config import InputError
from jaxpar.data.tokenizers import ByteTokenizer, load_tokenizer

TEXT = "the cat sat on the mat; the naïve cat sat on the hat\n" * 4


def write_tokenizer(folder, special_tokens=("<|endoftext|>",), truncation=False):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    if truncation:
        tokenizer.enable_truncation(3)
        tokenizer.enable_padding(length=5)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_bytes_are_their_own_ids():
    tokenizer = load_tokenizer("byte")
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert tokenizer.decode(np.array([104, 105, 256, 33])) == "hi!"
    pieces, replaced = tokenizer.encode_bytes([b"a\xff", bytes(range(256))])
    assert pieces[0].tolist() == [97, 255] and pieces[1].tolist() == list(range(256)) and replaced == 0


def test_hash_of_the_byte_tokenizer_never_changes():
    """Token files made by every version must stay readable."""
    assert ByteTokenizer.hash == "7ccb578f052a44f23b47c91533651b9227298a3e9e5540b6f7b2654bb10cdbe3"


def test_tokenizer_json(tmp_path):
    path = write_tokenizer(tmp_path)
    reference = Tokenizer.from_file(str(path))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode(TEXT).tolist() == reference.encode(TEXT).ids
    assert tokenizer.encode(TEXT).size < len(TEXT) / 2
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.vocab_size == reference.get_vocab_size()
    assert tokenizer.end_of_document == reference.token_to_id("<|endoftext|>") == 0
    assert tokenizer.hash == hashlib.sha256(path.read_bytes()).hexdigest()
    assert tokenizer.name == f"{tmp_path.name}/tokenizer.json"
    assert load_tokenizer(str(tmp_path)).hash == tokenizer.hash  # the folder will do


def test_bytes_to_tokens_in_batches_replacing_what_is_not_utf8(tmp_path):
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path)))
    pieces, replaced = tokenizer.encode_bytes([b"the cat", b"a\xff\xfe the", "\ufffd".encode()])
    assert replaced == 2  # the last piece holds the replacement character itself: valid
    assert [piece.tolist() for piece in pieces] == [
        tokenizer.encode(text).tolist() for text in ("the cat", "a\ufffd\ufffd the", "\ufffd")
    ]


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path):
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, truncation=True)))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode(tokenizer.encode("a")) == "a" and tokenizer.encode("a").size == 1


@pytest.mark.parametrize(
    ("special_tokens", "expected"),
    [
        (("<pad>", "</s>"), 1),
        (("<pad>", "</s>", "<|end_of_text|>"), 2),
        (("<eos>",), 0),
        (("<pad>",), None),
    ],
)
def test_end_of_document_is_found_by_name(tmp_path, special_tokens, expected):
    assert load_tokenizer(str(write_tokenizer(tmp_path, special_tokens))).end_of_document == expected


def test_vocabulary_with_holes_counts_up_to_the_largest_id(tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 999}, unk_token="a")).save(str(path))
    assert load_tokenizer(str(path)).vocab_size == 1000


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"data\.tokenizer=.*nothing.json: there is no file .*Give `byte`, or"):
        load_tokenizer(str(tmp_path / "nothing.json"))
    broken = tmp_path / "broken.json"
    broken.write_text('{"model": 3}')
    with pytest.raises(InputError, match=r"broken.json cannot be read as a Hugging Face tokenizer.json"):
        load_tokenizer(str(broken))
