"""Whole runs: what they write, killed and resumed ones bit for bit, and steps that are not finite."""

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_drift import flip_during
from tiny_run import metrics, quick_compiles_env, write_tiny

import jaxpar.cli
import jaxpar.step
from jaxpar import trainer
from jaxpar.checkpoint import Checkpoints
from jaxpar.config import CheckFailed, Config, load_config
from jaxpar.data.sources import open_data
from jaxpar.data.token_file import HEADER_BYTES
from jaxpar.data.tokenize import tokenize_files
from jaxpar.mesh import start
from jaxpar.models import Transformer

KEYS = {
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "skipped",
    "skipped_in_a_row",
    "tokens_per_second",
    "step_seconds",
    "peak_memory_bytes",
}
WHAT_IS_TRAINED = ("step", "loss", "grad_norm", "learning_rate", "tokens", "validation_loss")
"""The metrics that do not depend on the machine's speed."""
NO_EVALUATION = ("train.eval_every=null", "checkpoint.keep=9")
"""One program less to compile."""


def trained(run_dir: Path) -> list[dict[str, Any]]:
    """What a run computed, without what its speed and memory were."""
    return [{name: line[name] for name in WHAT_IS_TRAINED if name in line} for line in metrics(run_dir)]


def in_process(config_file: Path, *overrides: str) -> dict[str, Any]:
    """Train in this process; returns the last metrics."""
    return trainer.train(*start(load_config(config_file, overrides)))


def saved_state(config_file: Path, *overrides: str, step: int | None = None) -> Any:
    """The state in a run's checkpoint, on the host."""
    config, mesh = start(load_config(config_file, overrides))
    abstract = jaxpar.step.build(config, mesh).saved_state
    with Checkpoints(Path(config.train.run_dir) / "checkpoints", config.checkpoint.keep) as checkpoints:
        return jax.device_get(checkpoints.restore(abstract, step)[0])


def same_bits(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


@pytest.fixture(scope="module")
def whole_run(
    run_jaxpar: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path_factory: pytest.TempPathFactory,
    compile_cache: Path,
) -> tuple[Path, str]:
    """The config file of a run that nothing interrupted, and what it printed."""
    config_file = write_tiny(tmp_path_factory.mktemp("whole"))
    result = run_jaxpar(["train", config_file, "log.tensorboard=true"], env=quick_compiles_env(compile_cache))
    assert result.returncode == 0, result.stderr
    return config_file, result.stdout


def test_a_run_learns_and_leaves_its_files(whole_run: tuple[Path, str]):
    config_file, printed = whole_run
    run_dir = config_file.parent / "run"
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, 9))
    for line in lines:
        evaluated = {"validation_loss", "evaluation_seconds"} if line["step"] in (4, 8) else set()
        assert set(line) == KEYS | evaluated
        assert line["tokens"] == 8 * 16 and line["skipped"] == line["skipped_in_a_row"] == 0
        assert line["peak_memory_bytes"] > 10_000_000  # a process that has imported JAX
    assert lines[0]["tokens_per_second"] is lines[0]["step_seconds"] is None  # that step is mostly compilation
    for line in lines[1:]:
        assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(8 * 16, rel=1e-12)  # of one step
    # Untrained logits are nearly 0: log 257 to within the spread that weights of deviation 0.02 make.
    assert lines[0]["loss"] == pytest.approx(np.log(257), abs=0.1)
    losses = [line["loss"] for line in lines]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 4  # the text has 15 letters and the space
    assert lines[7]["validation_loss"] < lines[3]["validation_loss"] < lines[0]["loss"]
    assert lines[0]["learning_rate"] == pytest.approx(2e-2) and lines[7]["learning_rate"] < 2e-2  # a falling cosine
    stored = Config.from_yaml_text((run_dir / "config.yaml").read_text())
    assert stored == load_config(config_file, ["log.tensorboard=true"]).resolve_mesh(4)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["6", "8"]
    (events,) = (run_dir / "tensorboard").iterdir()
    assert np.float32(losses[-1]).tobytes() in events.read_bytes()
    assert saved_state(config_file).step == 8
    for said in (
        "mesh: data 2 × pipe 1 × tensor 2 = 4 devices (cpu, 1 process)",
        "batch: global_batch 8 = data 2 × microbatches 2 × 2 sequences per microbatch",
        "from the start",
        f"step 8/8  loss {losses[-1]:.4f}  validation_loss {lines[7]['validation_loss']:.4f}  grad_norm ",
        f"done: {run_dir} holds metrics.jsonl and checkpoints/8",
    ):
        assert said in printed


ENDED_AT_STEP_5 = """
import os, signal, sys, time
from pathlib import Path
from jaxpar import cli, trainer

saved, name = Path(sys.argv[1], "checkpoints", "3"), sys.argv[2]
write = trainer.MetricsWriter.write

def end(self, step, metrics):
    write(self, step, metrics)
    if step == 5:
        while not saved.exists():  # it is written in the background
            time.sleep(0.01)
        os.kill(os.getpid(), signal.Signals[name])

trainer.MetricsWriter.write = end
sys.argv = ["jaxpar", "train", *sys.argv[3:]]
cli.main()
"""


@pytest.mark.parametrize(("name", "code", "saved"), [("SIGKILL", -9, 3), ("SIGTERM", 143, 6), ("SIGINT", 130, 6)])
def test_a_run_ended_from_outside_continues_bit_for_bit(
    run_jaxpar, whole_run: tuple[Path, str], tmp_path: Path, compile_cache: Path, name: str, code: int, saved: int
):
    """SIGKILL ends it at once; SIGTERM and SIGINT after the step that was running, which is saved."""
    config_file, environment = write_tiny(tmp_path), {**os.environ, **quick_compiles_env(compile_cache)}
    command = [sys.executable, "-c", ENDED_AT_STEP_5, tmp_path / "run", name, config_file]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, max(5, saved) + 1))
    if name != "SIGKILL":
        assert f"stopped by {name} after step 6, which is saved" in ended.stdout
    with Checkpoints(tmp_path / "run" / "checkpoints", keep=2) as checkpoints:
        assert checkpoints.latest_step() == saved
    resumed = run_jaxpar(["train", config_file], env=environment)
    assert resumed.returncode == 0, resumed.stderr
    assert f"continued after step {saved}" in resumed.stdout
    whole_file, _ = whole_run
    assert trained(tmp_path / "run") == trained(whole_file.parent / "run")  # floats compared exactly
    assert same_bits(saved_state(config_file), saved_state(whole_file))


def test_a_run_continues_on_another_mesh(tmp_path: Path, quick_compiles: None):
    """Data 8 to data 2 × tensor 4, with dropout on: in float64 only the order of sums differs."""
    same = [*NO_EVALUATION, "train.param_dtype=float64", "train.compute_dtype=float64"]
    data8 = [*same, "mesh.data=8", "mesh.tensor=1", "parallel.microbatches=1"]
    other = [*same, "mesh.data=2", "mesh.tensor=4", "parallel.sequence_parallel=true"]
    config_file = write_tiny(tmp_path)
    in_process(config_file, *data8)
    whole, want = trained(tmp_path / "run"), saved_state(config_file, *data8)
    for step in ("6", "8"):
        (tmp_path / "run" / "checkpoints" / step).rename(tmp_path / step)  # as if it had been killed after step 3
    in_process(config_file, *other)
    continued, got = trained(tmp_path / "run"), saved_state(config_file, *other)
    assert continued[:3] == whole[:3] and len(continued) == 8
    for now, then in zip(continued[3:], whole[3:], strict=True):
        assert now == pytest.approx(then, rel=1e-12)  # rounding, 1e-16 in a sum, grown over five steps
    for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True):
        # Adam divides by the root of a mean square, in which the rounding of nearly vanishing gradients shows.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


def test_a_finished_run_is_continued_when_it_gets_more_steps(capsys, tmp_path: Path, quick_compiles: None):
    config_file = write_tiny(tmp_path)
    in_process(config_file, *NO_EVALUATION, "train.steps=4")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert in_process(config_file, *NO_EVALUATION, "train.steps=4") == {}
    assert "has already done 4 steps; set train.steps higher" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert in_process(config_file, *NO_EVALUATION, "train.steps=5")["step"] == 5
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_log_every_leaves_lines_out(tmp_path: Path, quick_compiles: None):
    in_process(write_tiny(tmp_path), "log.every=3", "train.steps=5")
    assert [line["step"] for line in metrics(tmp_path / "run")] == [3, 4, 5]  # 4 is an evaluation, 5 the last


POISON, POISON_GRADIENT = 7, 8
"""Bytes that the text does not have until a test puts them in."""


class Poisoned(Transformer):
    """A model whose loss, or only whose gradient, is NaN on the replica that reads a certain token."""

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        x = super().embed(tokens_BT)
        one = jnp.where((tokens_BT == POISON_GRADIENT).any(), 0, 1).astype(x.dtype)
        x = x + (jnp.sqrt(one + 0 * x) - one)  # adds 0; but the slope of a root is infinite at 0
        return jnp.where((tokens_BT == POISON).any(), jnp.nan, x)


def make_poisoned(config: Config) -> jaxpar.step.MakeModel:
    return lambda rngs: Poisoned(config.model, param_dtype=config.train.param_dtype, rngs=rngs)


def in_process_poisoned(config_file: Path, *overrides: str) -> dict[str, Any]:
    config, mesh = start(load_config(config_file, overrides))
    return trainer.train(config, mesh, make_model=make_poisoned(config))


def poison(config_file: Path, steps: dict[int, int]) -> None:
    """Put a token into one sequence of each of these steps, found by reading the data as the run will."""
    text = config_file.parent / "text.txt"
    data = open_data(load_config(config_file), config_file.parent / "tokens")
    content = bytearray(text.read_bytes())
    for step, token in steps.items():
        window = bytes(data.train.rows(step - 1, [5])["tokens"][0].astype(np.uint8))
        (start_byte,) = (at for at in range(0, len(content), 16) if content[at : at + 16] == window)
        content[start_byte + 3] = token
    text.write_bytes(content)


def test_steps_that_are_not_finite_are_passed_over(capsys, tmp_path: Path, quick_compiles: None):
    """Three bad steps, never too many in a row: each changes nothing but the counters."""
    config_file = write_tiny(tmp_path)
    poison(config_file, {2: POISON, 5: POISON_GRADIENT, 6: POISON})
    settings = [*NO_EVALUATION, "train.max_bad_steps=3", "checkpoint.every=1"]
    config, mesh = start(load_config(config_file, settings))
    trainer.train(config, mesh, make_model=make_poisoned(config))
    lines = metrics(tmp_path / "run")
    assert [line["skipped"] for line in lines] == [0, 1, 1, 1, 2, 3, 3, 3]
    assert [line["skipped_in_a_row"] for line in lines] == [0, 1, 0, 0, 1, 2, 0, 0]
    bad = {2: ["grad_norm", "loss"], 5: ["grad_norm"], 6: ["grad_norm", "loss"]}
    for line in lines:
        named = bad.get(line["step"], [])
        assert sorted(line.get("nonfinite", [])) == named, line
        assert [name for name in ("grad_norm", "loss") if line[name] is None] == named
    printed = capsys.readouterr().out
    said = [f"step {step} was not applied: loss " in printed for step in range(1, 9)]
    assert said == [step in bad for step in range(1, 9)]
    states = {step: saved_state(config_file, *settings, step=step) for step in range(1, 9)}
    for step in range(2, 9):
        before, after = states[step - 1], states[step]
        assert after.step == step
        unchanged = same_bits((before.params, before.opt_state), (after.params, after.opt_state))
        assert unchanged == (step in bad), step
    # The schedule advances with the steps that are applied: a passed-over one has the rate of the next.
    rates = [line["learning_rate"] for line in lines]
    assert rates[1] == rates[2] and rates[4] == rates[5] == rates[6]
    assert len(set(rates)) == 5 and rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("every", [3, 7])
def test_too_many_bad_steps_in_a_row_stop_the_run(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick_compiles: None, every: int
):
    """Through the command line: exit 1, and a checkpoint with the state after the last good step.

    Four bad steps are promised. Step 8, which is good, has begun when the metrics of step 7, the fourth, are read; but
    where step 7 is saved it has not.
    """
    config_file = write_tiny(tmp_path)
    poison(config_file, {1: POISON, **dict.fromkeys(range(4, 8), POISON)})
    settings = [*NO_EVALUATION, "train.steps=10", "train.max_bad_steps=4", f"checkpoint.every={every}"]
    monkeypatch.setattr(jaxpar.step, "model_maker", lambda config, platform: make_poisoned(config))
    monkeypatch.setattr(sys, "argv", ["jaxpar", "train", str(config_file), *settings])
    with pytest.raises(SystemExit) as stop:
        jaxpar.cli.main()
    assert stop.value.code == 1
    error = capsys.readouterr().err
    run_dir = tmp_path / "run"
    assert [line["skipped_in_a_row"] for line in metrics(run_dir)] == [1, 0, 0, 1, 2, 3, 4]
    for said in (
        "stopped: 4 steps in a row had a loss or gradient that was not finite (train.max_bad_steps = 4)",
        f"the last good state is in {run_dir}/checkpoints/7.",
        "Lower optimizer.learning_rate, set optimizer.clip_norm, or look at the data",
    ):
        assert said in error
    with Checkpoints(run_dir / "checkpoints", keep=9) as checkpoints:
        assert checkpoints.steps() == list(dict.fromkeys([*range(every, 8, every), 7]))
    saved = saved_state(config_file, *settings)
    assert (saved.step, saved.skipped, saved.skipped_in_a_row) == (7, 5, 4)
    if every == 3:
        good = saved_state(config_file, *settings, step=3)
        assert same_bits((good.params, good.opt_state), (saved.params, saved.opt_state))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(saved.params))
    # The same command has its four tries again.
    poison(config_file, dict.fromkeys(range(8, 11), POISON))
    monkeypatch.undo()
    assert in_process_poisoned(config_file, *settings)["step"] == 10
    assert [line["skipped_in_a_row"] for line in metrics(run_dir)][7:] == [1, 2, 3]


def test_the_state_that_bad_steps_leave_is_not_saved_unchecked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick_compiles: None
):
    config_file = write_tiny(tmp_path)
    poison(config_file, dict.fromkeys(range(4, 8), POISON))
    flip_during(monkeypatch, after_step=6, device=2)
    settings = [*NO_EVALUATION, "train.steps=10", "train.max_bad_steps=4", "checkpoint.every=null"]
    with pytest.raises(CheckFailed, match=r"(?s)after step 7 copies .* there is no checkpoint yet\."):
        in_process_poisoned(config_file, *settings, "train.drift_check_every=100")
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 8))


@contextmanager
def damaged(config: Config, file: Path, step: int) -> Iterator[int]:
    """Put an id into a token file behind its header's back, where this step alone reads it; gives the token's index."""
    window = open_data(config, file.parent).train.rows(step - 1, [5])["tokens"][0]
    tokens = np.memmap(file, "<u2", "r+", HEADER_BYTES)
    length = window.size
    (start_token,) = (at for at in range(0, 8000, length) if np.array_equal(tokens[at : at + length], window))
    at = start_token + 3
    was, tokens[at] = int(tokens[at]), 65535
    tokens.flush()
    yield at
    tokens[at] = was
    tokens.flush()


@pytest.mark.parametrize("step", [1, 5, 6])
def test_a_batch_with_an_id_that_is_not_in_the_vocabulary_is_refused(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick_compiles: None, step: int
):
    """Through the command line: exit 2, the state before it saved; mended, the run goes on as if nothing had been.

    Step 7 has begun when the refusal of step 6 would be read, were it not that step 6 is to be saved.
    """
    config_file, file, run_dir = write_tiny(tmp_path), tmp_path / "text.tokens", tmp_path / "run"
    tokenize_files([f"{tmp_path}/text.txt"], file)
    settings = [f"data.train=[{file}]"]
    monkeypatch.setattr(sys, "argv", ["jaxpar", "train", str(config_file), *settings])
    with damaged(load_config(config_file, settings), file, step) as at, pytest.raises(SystemExit) as stop:
        jaxpar.cli.main()
    assert stop.value.code == 2
    kept = f"The state after step {step - 1} is saved" if step > 1 else "Nothing was trained."
    error = capsys.readouterr().err
    for said in (
        f"error: the batch of step {step} was refused: {file} holds the id 65535 at token {at} (the first is 0), but ",
        "model.vocab_size=257 allows only ids from 0 to 256",
        kept,
    ):
        assert said in error
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, step))
    if step > 1:
        assert saved_state(config_file, *settings).step == step - 1
    in_process(config_file, *settings)
    undisturbed = [*settings, f"train.run_dir={tmp_path}/undisturbed"]
    in_process(config_file, *undisturbed)
    assert trained(run_dir) == trained(tmp_path / "undisturbed")
    assert same_bits(saved_state(config_file, *settings), saved_state(config_file, *undisturbed))


@pytest.mark.slow
def test_all_processes_refuse_what_one_of_them_does(tmp_path: Path, compile_cache: Path):
    """The second of two has the row in question; the first waits for it in the step, and must not hang nor go on."""
    config_file, file, run_dir = write_tiny(tmp_path), tmp_path / "text.tokens", tmp_path / "run"
    tokenize_files([f"{tmp_path}/text.txt"], file)
    settings = [*NO_EVALUATION, f"data.train=[{file}]"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    joined = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    environment = {**os.environ, **quick_compiles_env(compile_cache), **joined}
    command = [Path(sys.executable).with_name("jaxpar"), "train", config_file, *settings]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with damaged(load_config(config_file, settings), file, step=5) as at:
        processes = [
            subprocess.Popen(command, env={**environment, "JAX_PROCESS_ID": str(process)}, **pipes)
            for process in range(2)
        ]
        errors = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], errors
    whys = ("it holds what another process of this run refuses", f"{file} holds the id 65535 at token {at} ")
    for error, why in zip(errors, whys, strict=True):
        assert f"the batch of step 5 was refused: {why}" in error and "The state after step 4 is saved" in error
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4]
    in_process(config_file, *settings)
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, 9))


QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"


@pytest.mark.slow
def test_quickstart_keeps_its_promise(run_jaxpar, tmp_path: Path):
    """The file's comment: on text that it has not seen, too, the loss falls below 2.5."""
    assert "to below 2.5, on held-out text too" in " ".join(QUICKSTART.read_text().split())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = run_jaxpar(["train", QUICKSTART, f"train.run_dir={tmp_path}"], env={"JAX_PLATFORMS": "cpu"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    # Three minutes on 2 cores. Processor time, since wall time depends on what else runs.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2 * 180
    lines = metrics(tmp_path)
    assert lines[0]["loss"] == pytest.approx(np.log(257), abs=0.1)
    assert np.mean([line["loss"] for line in lines[-20:]]) < 2.5  # single batches vary by 0.1
    assert lines[-1]["validation_loss"] < 2.5
    assert (tmp_path / "checkpoints" / str(lines[-1]["step"])).is_dir()
