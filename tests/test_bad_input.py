"""What a user can get wrong: each ends in exit code 2 and a paragraph: the key, the value, the rule and a way out."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from tiny_run import metrics, quick_compiles_env, write_tiny
from tokenizers import Tokenizer, models, pre_tokenizers

import jaxpar.cli
from jaxpar.data.token_file import HEADER_BYTES
from jaxpar.data.tokenize import tokenize_files
from jaxpar.run_folder import locked

Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run `jaxpar ARGS...` in this process, see it end with exit code 2, and return what it said."""

    def run(*args: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["jaxpar", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            jaxpar.cli.main()
        said = capsys.readouterr().err
        assert stop.value.code == 2, said
        assert said.startswith("error: ")
        return said

    return run


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.hiden_size=32", ["model.hiden_size: there is no such key; did you mean model.hidden_size?"]),
        ("trian.steps=8", ["trian.steps: there is no such key; did you mean train.steps"]),
        ("train.steps=ten", ['train.steps = "ten": must be a whole number', "at least 1"]),
        ("optimizer.learning_rate='1e-3'", ['optimizer.learning_rate = "1e-3"', "Write 0.001 without quotes."]),
        ("optimizer.name=adam", ['optimizer.name = "adam"', "adamw, lion, adafactor", "Did you mean adamw?"]),
        ("train.max_bad_steps=0", ["train.max_bad_steps = 0", "at least 1"]),
        (
            "model.num_attention_heads=6",
            [
                "model.hidden_size 16 % model.num_attention_heads 6 = 4, must be 0",
                "Use hidden_size 12 or 18",
                "head_dim",
            ],
        ),
        (
            "model.num_attention_heads=1 model.num_key_value_heads=1",
            ["model.num_attention_heads 1 % mesh.tensor 2 = 1, must be 0", "heads are split over tensor", "tensor 1"],
        ),
        (
            "mesh.devices=8",
            ["mesh.data 2 × mesh.pipe 1 × mesh.tensor 2 = 4, must be the number of devices, 8", "Use data 4", "-1"],
        ),
        (
            "train.global_batch=9",
            ["train.global_batch 9 % (mesh.data 2 × parallel.microbatches 2) = 1, must be 0", "global_batch 8 or 12"],
        ),
        (
            "train.data_parallel=parameter_server parameter_server.workers=3 parameter_server.min_workers=4",
            [
                "train.global_batch 8 % (parameter_server.workers 3 × mesh.data 2 × parallel.microbatches 2) = 8",
                "Use global_batch 12, or workers 2.",
                "parameter_server.min_workers 4 ≤ parameter_server.workers 3 does not hold",
            ],
        ),
        (
            "parameter_server.worker_timeout_seconds=1e300",
            ["parameter_server.worker_timeout_seconds = 1e+300", "at most 86,400"],
        ),
        ("data.train=[{folder}/txt.txt]", ["data.train: there is no file", "Did you mean", "/text.txt?"]),
        ("data.train=[{folder}/*.md]", ["data.train: the glob", "/*.md matches no file"]),
        (
            "data.sequence_length=100000",
            ["data.train", "are too few for one sequence", "data.sequence_length + 1 = 100001"],
        ),
        ("data.tokenizer=nowhere.json", ["data.tokenizer=nowhere.json: there is no file", "`byte`"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_config_and_files(refused: Refused, tmp_path: Path, override: str, said: list[str]):
    text = refused("train", write_tiny(tmp_path), *override.format(folder=tmp_path).split(" "))
    assert all(words in text for words in said), text


def test_empty_text(refused: Refused, tmp_path: Path):
    config = write_tiny(tmp_path)
    (tmp_path / "text.txt").write_text("")
    text = refused("train", config)
    assert f"no tokens: there is no text in {tmp_path}/text.txt" in text


def word_tokenizer(path: Path) -> Path:
    """A `tokenizer.json` of 1000 words."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1000)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def test_token_files_that_do_not_fit(refused: Refused, tmp_path: Path):
    config, words, tokens = write_tiny(tmp_path), word_tokenizer(tmp_path / "words.json"), tmp_path / "words.tokens"
    (tmp_path / "words.txt").write_text(" ".join(f"w{i}" for i in range(500)))
    tokenize_files([str(tmp_path / "words.txt")], tokens, str(words))
    said = refused("train", config, f"data.train={tokens}")
    assert f"{tokens} was made by the tokenizer" in said and "words.json" in said
    assert "but data.tokenizer is byte" in said and "Set data.tokenizer to the tokenizer of the file" in said
    said = refused("train", config, f"data.train={tokens}", f"data.tokenizer={words}")
    assert f"{tokens} holds the token id 499, but model.vocab_size=257 allows only ids < 257" in said
    assert "Set model.vocab_size=1000" in said
    whole = tokens.stat().st_size
    os.truncate(tokens, HEADER_BYTES + 100)
    said = refused("train", config, f"data.train={tokens}", f"data.tokenizer={words}", "model.vocab_size=1000")
    assert f"{tokens} is truncated" in said and f"{whole} bytes, but the file has {HEADER_BYTES + 100}" in said
    assert "make it again with `jaxpar tokenize`" in said
    tokens.write_text("no token file at all\n" * 500)
    said = refused("train", config, f"data.train={tokens}")
    assert f"{tokens} is not a token file" in said and "made by `jaxpar tokenize`" in said


def test_in_processes_of_their_own(run_jaxpar, tmp_path: Path):
    """Whatever JAX and its libraries log on their way out, the paragraph comes last, and is one line here."""
    config = write_tiny(tmp_path)
    (tmp_path / "cut.tokens").write_bytes(b"JAXPARTK")
    cases = [
        ("model.hiden_size=32", "model.hiden_size: there is no such key"),
        ("data.train=[nowhere.txt]", "data.train: there is no file nowhere.txt"),
        (f"data.train=[{tmp_path}/cut.tokens]", "cut.tokens is truncated"),
        ("mesh.devices=3", "must be the number of devices, 3"),
    ]
    for override, said in cases:
        result = run_jaxpar(["train", config, override], env={"JAX_PLATFORMS": "cpu"}, cwd=tmp_path)
        assert result.returncode == 2 and result.stdout == "" and "Traceback" not in result.stderr
        last = result.stderr.splitlines()[-1]
        assert last.startswith("error: ") and said in last, result.stderr


SHORT = ("train.steps=3", "train.eval_every=null")


@pytest.fixture
def started(tmp_path: Path, quick_compiles: None) -> Path:
    """The config file of a run of three steps that are made and saved."""
    train(write_tiny(tmp_path), *SHORT)
    return tmp_path / "tiny.yaml"


def train(config_file: Path, *args: str) -> None:
    """`jaxpar train` in this process; an error is raised as it is."""
    jaxpar.cli.app(["train", str(config_file), *args], standalone_mode=False)


def test_a_run_folder_of_another_config(refused: Refused, started: Path):
    run_dir = started.parent / "run"
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    changes = ["optimizer.learning_rate=1e-3", "train.seed=1", "model.sliding_window=8"]
    allowed = ["mesh.data=4", "checkpoint.keep=5", "log.every=2"]
    said = refused("train", started, *SHORT, *changes, *allowed)
    assert said.splitlines() == [
        f"error: {run_dir} holds a run with another config:",
        "- model.sliding_window: null there, 8 now",
        "- optimizer.learning_rate: 0.02 there, 0.001 now",
        "- train.seed: 0 there, 1 now",
        "To continue that run as it was, add: model.sliding_window=null optimizer.learning_rate=0.02 train.seed=0",
        "To continue it with the new values, add --accept-changes. To start afresh, set another train.run_dir.",
    ]
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    # Both ways out lead out.
    train(started, *SHORT, *changes, "model.sliding_window=null", "optimizer.learning_rate=0.02", "train.seed=0")
    train(started, *SHORT, "train.steps=4", "optimizer.learning_rate=1e-3", "--accept-changes")
    first, *_, last = metrics(run_dir)
    # A cosine at its beginning and three steps of twenty later: 0.1 + 0.9 · (1 + cos(3π/20)) / 2 of the rate.
    assert first["learning_rate"] == pytest.approx(0.02) and last["learning_rate"] == pytest.approx(
        0.95095e-3, rel=1e-4
    )
    assert "learning_rate: 0.001\n" in (run_dir / "config.yaml").read_text()


def test_the_way_back_survives_a_shell(refused: Refused, started: Path):
    """Lists, nulls and whole sections in what the message says to add."""
    text = started.parent / "text.txt"
    scaling = (
        "{rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 8}"
    )
    changes = [f"data.train=[{text}, {text}]", f"model.rope_scaling={scaling}"]
    said = refused("train", started, *SHORT, *changes)
    (way_back,) = (line for line in said.splitlines() if line.startswith("To continue that run as it was, add: "))
    command = f"printf '%s\\n' {way_back.partition('add: ')[2]}"
    added = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout.splitlines()
    assert added == [f'data.train=[{{"paths": ["{text}"], "weight": 1.0}}]', "model.rope_scaling=null"]
    train(started, *SHORT, *changes, *added)


def test_more_steps_and_the_schedule(refused: Refused, started: Path):
    """decay_steps is train.steps by default: a run that gets more steps is told so."""
    shutil.rmtree(started.parent / "run")
    train(started, *SHORT, "optimizer.decay_steps=null")
    more = ["train.eval_every=null", "optimizer.decay_steps=null", "train.steps=5"]
    said = refused("train", started, *more)
    assert "- optimizer.decay_steps: 3 there, 5 now\n" in said
    assert "is train.steps unless it is set" in said and "add: optimizer.decay_steps=3\n" in said
    assert "train.steps:" not in said
    train(started, *more, "optimizer.decay_steps=3")
    rates = [line["learning_rate"] for line in metrics(started.parent / "run")]
    assert rates[3:] == pytest.approx([2e-3] * 2) and rates[2] > 2e-3  # the tenth that remains at the end
    # Without a schedule there is nothing that could differ.
    shutil.rmtree(started.parent / "run")
    for steps in (3, 4):
        train(started, *more, "optimizer.schedule=constant", f"train.steps={steps}")
    assert [line["step"] for line in metrics(started.parent / "run")] == [1, 2, 3, 4]


def test_a_stored_config_that_cannot_be_read(refused: Refused, started: Path):
    stored = started.parent / "run" / "config.yaml"
    whole = stored.read_text()
    for broken, reason in (
        (whole.replace("seed:", "sed:"), "train.sed: there is no such key; did you mean train.seed?"),
        (whole[: len(whole) // 2], ""),
        ("model: [", "line 1"),
        (b"\xff\xfe", "not a text file in UTF-8"),
    ):
        stored.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
        said = refused("train", started, *SHORT)
        assert f"The config of the run in {stored.parent} cannot be read." in said
        assert str(stored) in said and reason in said
        assert "If the config given now is that run's, add --accept-changes" in said
    train(started, *SHORT, "--accept-changes")
    assert stored.read_text() == whole
    # Without the file, the checkpoint knows.
    stored.unlink()
    assert "- train.seed: 0 there, 1 now" in refused("train", started, *SHORT, "train.seed=1")
    # A run that never made a step is nothing to protect.
    shutil.rmtree(stored.parent / "checkpoints")
    (stored.parent / "metrics.jsonl").write_text("")
    stored.write_text(whole)
    train(started, *SHORT, "train.seed=1")


def test_run_folders_that_cannot_be_used(refused: Refused, tmp_path: Path):
    config, file = write_tiny(tmp_path), tmp_path / "file"
    file.write_text("mine")
    said = refused("train", config, f"train.run_dir={file}")
    assert f"train.run_dir = {file} cannot be used: a file has that name. Choose another train.run_dir." in said
    said = refused("train", config, f"train.run_dir={file}/run")
    assert f"train.run_dir = {file}/run cannot be used: " in said and "Not a directory" in said
    assert file.read_text() == "mine"
    said = refused("train", config, "train.run_dir=/proc/run")  # root may write everywhere else
    assert "train.run_dir = /proc/run cannot be used: /proc/run: No such file or directory" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_folder_without_write_permission(refused: Refused, tmp_path: Path):
    config = write_tiny(tmp_path)
    (tmp_path / "run").mkdir(mode=0o500)
    said = refused("train", config)
    assert f"train.run_dir = {tmp_path}/run cannot be used: it cannot be written to" in said


WITH_LOCK = """
import sys
from pathlib import Path
from jaxpar.run_folder import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_run_folder_in_which_another_process_trains(refused: Refused, started: Path):
    """The second run changes nothing there; when the first has ended, however, it goes on."""
    run_dir = started.parent / "run"
    contents = lambda: {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    command, pipe = [sys.executable, "-c", WITH_LOCK, run_dir], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout and other.stdout.readline() == "locked\n"
        before = contents()
        said = refused("train", started, *SHORT, "train.steps=4")
        assert f"train.run_dir = {run_dir} is in use: another process, {other.pid} on " in said
        assert "Wait until it has ended, or choose another train.run_dir." in said
        assert contents() == before
        other.kill()
    train(started, *SHORT, "train.steps=4")
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_a_file_system_without_locks_will_do(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Any other error is one."""

    def no_locks(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OSError) if number == errno.EIO else nullcontext(), locked(tmp_path):
        assert (tmp_path / "lock").read_text().startswith(f"{os.getpid()} on ")


WITH_SMALL_FILES = """
import resource, sys
from jaxpar import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (12 << 10, resource.RLIM_INFINITY))
sys.argv = ["jaxpar", *sys.argv[1:]]
cli.command()
"""


def test_a_full_disk_at_a_checkpoint(run_jaxpar, tmp_path: Path, compile_cache: Path):
    """Files that may not grow beyond 12 KiB stand for a full disk: metrics fit, a checkpoint does not."""
    config, environment = write_tiny(tmp_path), quick_compiles_env(compile_cache)
    begun = run_jaxpar(["train", config, "train.steps=3"], env=environment)
    assert begun.returncode == 0, begun.stderr
    command = [sys.executable, "-c", WITH_SMALL_FILES, "train", config]
    full = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
    assert full.returncode == 2 and "Traceback" not in full.stderr, full.stderr
    error = full.stderr.splitlines()[-1]
    assert error.startswith(f"error: A checkpoint could not be written to {tmp_path}/run/checkpoints: file too large.")
    for said in (
        "The checkpoint of step 3 is still usable",
        "the same command goes on from there",
        "Make room first",
        "point train.run_dir to a larger disk",
        "checkpoint.keep (now 2)",
    ):
        assert said in error
    # Orbax's threads may still leave a folder of another name behind, which the next run removes.
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit()] == ["3"]
    again = run_jaxpar(["train", config], env=environment)
    assert again.returncode == 0 and "continued after step 3" in again.stdout, again.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 9))
