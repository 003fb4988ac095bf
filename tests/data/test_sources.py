import os

import numpy as np
import pytest
from test_tokenizers import TEXT, write_tokenizer

from jaxpar.config import Config, InputError
from jaxpar.data.sources import open_data
from jaxpar.data.token_file import HEADER_BYTES
from jaxpar.data.tokenize import tokenize_files


def make_config(data, vocab_size=257, **train):
    return Config.from_dict(
        {
            "model": {
                "architecture": "llama",
                "vocab_size": vocab_size,
                "hidden_size": 8,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "data": {"sequence_length": 16} | data,
            "optimizer": {"learning_rate": 0.1},
            "train": {"steps": 10, "global_batch": 4, "run_dir": "unused"} | train,
        }
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "one.txt").write_bytes(bytes(range(200)) * 8)  # 1601 tokens: 100 windows
    (tmp_path / "two.txt").write_bytes(b"b" * 799)  # 800 tokens: 49 windows
    return tmp_path


def tokens_of(examples, steps):
    return np.concatenate([examples.rows(step, range(4))["tokens"] for step in range(steps)])


def test_text_is_tokenized_once_and_again_when_it_changes(folder):
    config, cache = make_config({"train": [f"{folder}/*.txt"]}), folder / "run" / "tokens"
    data = open_data(config, cache)
    assert data.validation is None and data.tokenizer.name == "byte"
    (made,) = cache.iterdir()
    before = made.stat().st_mtime_ns
    again = open_data(config, cache)
    assert list(cache.iterdir()) == [made] and made.stat().st_mtime_ns == before
    np.testing.assert_array_equal(tokens_of(data.train, 20), tokens_of(again.train, 20))
    (folder / "two.txt").write_bytes(b"c" * 799)
    changed = open_data(config, cache)
    assert len(list(cache.iterdir())) == 2
    seen = set(tokens_of(changed.train, 40).ravel())
    assert ord("c") in seen


def test_plain_paths_are_one_source_read_once_an_epoch(folder):
    data = open_data(make_config({"train": [f"{folder}/one.txt", f"{folder}/two.txt"]}), folder / "tokens")
    tokens = tokens_of(data.train, 150)  # 2401 tokens make 150 windows; 4 epochs
    ids, counts = np.unique(np.concatenate([tokens.ravel()]), return_counts=True)
    whole = np.fromfile(folder / "one.txt", np.uint8).tolist() + [256] + [ord("b")] * 799 + [256]
    expected_ids, expected = np.unique(whole[:2400], return_counts=True)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(counts, 4 * expected)


def test_token_files_and_text_make_the_same_examples(folder):
    tokenize_files([f"{folder}/*.txt"], folder / "made.tokens")
    from_text = open_data(make_config({"train": [f"{folder}/*.txt"]}), folder / "cache")
    from_tokens = open_data(make_config({"train": [f"{folder}/made.tokens"]}), folder / "unused")
    np.testing.assert_array_equal(tokens_of(from_text.train, 9), tokens_of(from_tokens.train, 9))
    assert not (folder / "unused").exists()


def test_weights_mix_sources(folder):
    sources = [{"paths": [f"{folder}/one.txt"], "weight": 1.0}, {"paths": [f"{folder}/two.txt"], "weight": 3.0}]
    data = open_data(make_config({"train": sources}), folder / "tokens")
    tokens = tokens_of(data.train, 100)
    assert (tokens[:, 0] == ord("b")).mean() == pytest.approx(0.75, abs=0.01)
    assert "75.0% of each batch" in data.summary[1] and "training sequences" in data.summary[1]


def test_held_out_tail_of_each_source(folder):
    """one.txt keeps 90 of its windows, two.txt 44; two.txt's tail holds a marker that training must never see."""
    (folder / "two.txt").write_bytes(b"b" * 720 + b"\xff" * 79)
    sources = [{"paths": [f"{folder}/one.txt"]}, {"paths": [f"{folder}/two.txt"]}]
    data = open_data(make_config({"train": sources, "validation": 0.1}, eval_batches=100), folder / "tokens")
    assert data.validation is not None and data.validation.windows == 14
    read = [data.validation.rows(step, range(4)) for step in range(len(data.validation))]
    held = np.concatenate([batch["tokens"][batch["mask"].all(1)] for batch in read])
    assert len(held) == 14 and 255 in held
    train = np.concatenate([data.train.rows(step, range(4))["targets"] for step in range(200)])
    assert ord("b") in train and 255 not in train
    assert "14 sequences of 16, of which each evaluation reads 14 in 4 batches" in data.summary[-1]


def test_validation_of_its_own(folder):
    config = make_config({"train": [f"{folder}/one.txt"], "validation": [f"{folder}/two.txt"]}, eval_batches=2)
    data = open_data(config, folder / "tokens")
    assert data.validation is not None and len(data.validation) == 2
    assert set(tokens_of(data.validation, 2).ravel()) == {ord("b")}
    assert len(os.listdir(folder / "tokens")) == 2


def test_hugging_face_tokenizer(folder):
    (folder / "text.txt").write_text(TEXT * 20, encoding="utf-8")
    name = str(write_tokenizer(folder))
    data = open_data(
        make_config({"train": [f"{folder}/text.txt"], "tokenizer": name}, vocab_size=300), folder / "tokens"
    )
    window = data.train.rows(0, [0])["tokens"][0]
    assert data.tokenizer.decode(window) in TEXT * 2


def test_summary_says_what_the_run_will_read(folder):
    data = open_data(make_config({"train": [f"{folder}/one.txt"]}), folder / "tokens")
    assert data.summary == (
        f"data.train: {folder}/one.txt: 1,601 tokens, 100 training sequences of 16; this run reads them 0.4 times",
    )


def bad_inputs(folder):
    tokenize_files([f"{folder}/one.txt"], folder / "good.tokens")
    (folder / "cut.tokens").write_bytes((folder / "good.tokens").read_bytes()[:-100])
    (folder / "fake.tokens").write_text("hello")
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("short")
    (folder / "two_windows.txt").write_text("x" * 32)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": ["{}/on.txt"]}, r"data.train: there is no file .*/on.txt. Did you mean .*/one.txt\?"),
        ({"train": ["{}/*.csv"]}, r"data.train: the glob .*/\*.csv matches no file"),
        ({"train": ["{}/empty.txt"]}, r"no tokens: there is no text in .*/empty.txt"),
        (
            {"train": ["{}/short.txt"]},
            r"data.train \(.*short.txt\): 6 tokens are too few for one sequence, which takes data.sequence_length "
            r"\+ 1 = 17 tokens. Give more text, or set data.sequence_length to at most 5",
        ),
        (
            {"train": ["{}/two_windows.txt"], "validation": 0.5},
            r"data.validation=0.5 of data.train: 33 tokens do not make one sequence to train on and one to hold out",
        ),
        (
            {"train": ["{}/one.txt"], "validation": ["{}/short.txt"]},
            r"data.validation \(.*short.txt\): 6 tokens are too few for one sequence",
        ),
        ({"train": ["{}/cut.tokens"]}, r"cut.tokens is truncated: its header promises 1601 tokens"),
        ({"train": ["{}/fake.tokens"]}, r"fake.tokens is not a token file: it begins with b'hello'"),
        (
            {"train": ["{}/good.tokens"], "tokenizer": "{}/tokenizer.json"},
            r"good.tokens was made by the tokenizer byte .*, but data.tokenizer is .*/tokenizer.json",
        ),
        ({"train": ["{}/one.txt"], "tokenizer": "{}/no.json"}, r"data.tokenizer=.*no.json: there is no file"),
        (
            {"train": ["{}/one.txt"], "validation": [{"paths": ["{}/two.txt"], "weight": 2.0}]},
            r"data.validation.weight=2.0 has no meaning: an evaluation reads all sources alike. Remove it",
        ),
        (
            {"train": [{"paths": ["{}/one.txt"]}, {"paths": ["{}/gone"], "weight": 2.0}]},
            r"data.train\[1\]: there is no file",
        ),
    ],
)
def test_bad_inputs_are_named(folder, data, message):
    bad_inputs(folder)
    write_tokenizer(folder)

    def put(value):
        if isinstance(value, dict):
            return {key: put(item) for key, item in value.items()}
        if isinstance(value, list):
            return [put(item) for item in value]
        return value.replace("{}", str(folder)) if isinstance(value, str) else value

    with pytest.raises(InputError, match=message):
        open_data(make_config(put(data), vocab_size=300), folder / "tokens")


def test_damaged_validation_data_are_refused_at_the_start_and_training_data_when_they_are_read(folder):
    tokenize_files([f"{folder}/one.txt"], folder / "one.tokens")
    tokenize_files([f"{folder}/two.txt"], folder / "two.tokens")
    with (folder / "two.tokens").open("r+b") as file:
        file.seek(HEADER_BYTES + 2 * 50)  # in window 3
        file.write(b"\xff\xff")
    files = [f"{folder}/one.tokens"], [f"{folder}/two.tokens"]
    message = r"two.tokens holds the id 65535 at token 50 \(the first is 0\), but model.vocab_size=257"
    with pytest.raises(InputError, match=message):
        open_data(make_config({"train": files[0], "validation": files[1]}, eval_batches=20), folder / "tokens")
    data = open_data(make_config({"train": files[1], "validation": files[0]}), folder / "tokens")
    with pytest.raises(InputError, match=message):
        tokens_of(data.train, 13)  # an epoch


def test_token_beyond_the_vocabulary_is_refused(folder):
    config = make_config({"train": [f"{folder}/one.txt"], "tokenizer": str(write_tokenizer(folder))}, vocab_size=100)
    with pytest.raises(InputError, match=r"holds the token id \d+, but model.vocab_size=100 allows only ids < 100"):
        open_data(config, folder / "tokens")
