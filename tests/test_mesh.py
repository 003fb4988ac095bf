"""Device order, errors before anything is compiled, virtual devices, and starting one or two processes."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest
from tiny_run import metrics, quick_compiles_env, write_tiny

from jaxpar.checkpoint import Checkpoints
from jaxpar.config import Config, InputError, load_config
from jaxpar.mesh import AXES, batch_spec, make_mesh, start, use_cpu_devices


@dataclass(frozen=True)
class FakeDevice:
    slice_index: int
    process_index: int
    id: int


def cluster(slices: int, processes: int, devices: int) -> list[FakeDevice]:
    """Shuffled devices whose ids, unlike on most clusters, do not rise with the process: the last process has id 0."""
    found = [
        FakeDevice(s, s * processes + p, (slices * processes - s * processes - p) * devices - 1 - d)
        for s in range(slices)
        for p in range(processes)
        for d in range(devices)
    ]
    random.Random(1).shuffle(found)
    return found


def test_tensor_changes_fastest_and_stays_within_a_host():
    mesh = make_mesh(data=2, pipe=2, tensor=4, devices=cluster(slices=2, processes=2, devices=4))
    assert mesh.axis_names == AXES and mesh.devices.shape == (2, 2, 4)
    for block in mesh.devices.reshape(4, 4):
        assert len({d.process_index for d in block}) == 1
        assert [d.id for d in block] == sorted(d.id for d in block)
    assert [mesh.devices[data, pipe, 0].process_index for data in (0, 1) for pipe in (0, 1)] == [0, 1, 2, 3]
    assert [{d.slice_index for d in replica.flat} for replica in mesh.devices] == [{0}, {1}]


def test_a_smaller_tensor_axis_has_neighbouring_devices():
    mesh = make_mesh(data=4, tensor=2, devices=cluster(slices=1, processes=2, devices=4))
    assert [[(d.process_index, d.id) for d in row] for row in mesh.devices[:, 0]] == [
        [(0, 4), (0, 5)], [(0, 6), (0, 7)], [(1, 0), (1, 1)], [(1, 2), (1, 3)]
    ]  # fmt: skip


def test_the_default_devices():
    assert make_mesh(data=2, tensor=2).devices.flatten().tolist() == jax.devices()[:4]
    assert make_mesh(tensor=8).devices.flatten().tolist() == jax.devices()


def test_part_of_the_devices_comes_evenly_from_all_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "devices", lambda: cluster(slices=1, processes=2, devices=4))
    mesh = make_mesh(data=2, tensor=2)
    assert [(d.process_index, d.id) for d in mesh.devices.flat] == [(0, 4), (0, 5), (1, 0), (1, 1)]
    with pytest.raises(InputError, match=r"3 of 8 devices cannot be taken evenly from 2 processes.*multiple of 2"):
        make_mesh(data=3)


def test_wrong_numbers_of_devices():
    with pytest.raises(InputError, match=r"data 3 × pipe 1 × tensor 4 = 12 devices, but there are 8\..*devices\(12\)"):
        make_mesh(data=3, tensor=4)
    with pytest.raises(InputError, match=r"data 2 × pipe 1 × tensor 2 = 4 devices, but there are 8\."):
        make_mesh(data=2, tensor=2, devices=jax.devices())


def test_batches_are_split_over_data_only():
    assert batch_spec(make_mesh(data=2, tensor=4)) == jax.P("data")
    assert batch_spec(make_mesh(tensor=8)) == jax.P()


def test_cpu_devices_when_jax_runs_already():
    assert len(jax.devices()) == 8
    use_cpu_devices(8)  # there are as many
    with pytest.raises(InputError, match=r"9 CPU devices are needed, but JAX already runs with 8.*restart") as failure:
        use_cpu_devices(9)
    assert "use_cpu_devices(9) first" in str(failure.value) and "XLA_FLAGS" in str(failure.value)


COUNTED = """
import sys, jax
from jaxpar.config import InputError
from jaxpar.mesh import use_cpu_devices
if sys.argv[1] == "late":
    jax.devices()
try:
    use_cpu_devices(int(sys.argv[2]))
except InputError as error:
    print(error)
print(len(jax.devices()), "devices")
"""


@pytest.mark.parametrize(
    ("args", "flags", "said"),
    [
        (("early", "6"), "", ["6 devices"]),
        (("late", "6"), "", ["6 CPU devices are needed, but JAX already runs with 1", "1 devices"]),
        # XLA_FLAGS would win over JAX's own setting: the number there is what one has.
        (("early", "3"), "--xla_force_host_platform_device_count=5", ["5 devices"]),
        (("early", "6"), "--xla_force_host_platform_device_count=5", ["already runs with 5", "XLA_FLAGS", "5 devices"]),
        (("early", "3"), "--xla_cpu_enable_fast_math=false", ["3 devices"]),
    ],
)
def test_cpu_devices_in_a_new_process(args: tuple[str, str], flags: str, said: list[str]):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-W", "error", "-c", COUNTED, *args]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert all(words in result.stdout for words in said), result.stdout


@pytest.mark.parametrize(
    ("overrides", "shape"),
    [
        (["mesh.data=2", "mesh.tensor=2"], (2, 1, 2)),
        (["mesh.data=-1", "mesh.tensor=2"], (4, 1, 2)),  # of the 8 devices that there are
        (["mesh.data=2", "mesh.tensor=-1", "mesh.devices=4"], (2, 1, 2)),
        (["mesh.data=-1", "mesh.tensor=1", "mesh.devices=2"], (2, 1, 1)),
    ],
)
def test_start_resolves_the_mesh(tmp_path: Path, overrides: list[str], shape: tuple[int, int, int]):
    config, mesh = start(load_config(write_tiny(tmp_path), overrides))
    assert mesh.devices.shape == shape == (config.mesh.data, config.mesh.pipe, config.mesh.tensor)
    assert config.mesh.devices == mesh.size
    assert Config.from_yaml_text(config.to_yaml()) == config


def test_start_refuses_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = write_tiny(tmp_path)
    assert len(jax.devices()) == 8  # JAX is running
    with pytest.raises(InputError, match="16 CPU devices are needed, but JAX already runs with 8"):
        start(load_config(config, ["mesh.data=8", "train.global_batch=16"]))
    with pytest.raises(InputError, match=r"mesh.devices 8 % \(mesh.pipe 1 × mesh.tensor 3\) = 2, must be 0"):
        three = ["model.hidden_size=24", "model.num_attention_heads=6", "model.num_key_value_heads=3"]
        start(load_config(config, [*three, "mesh.data=-1", "mesh.tensor=3"]))
    with pytest.raises(InputError, match=r"train.global_batch 8 % \(mesh.data 8 × parallel.microbatches 2\) = 8"):
        start(load_config(config, ["mesh.data=-1", "mesh.tensor=1"]))
    for given in ({"JAX_NUM_PROCESSES": "2"}, {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "two"}):
        with monkeypatch.context() as environment:
            for name, value in given.items():
                environment.setenv(name, value)
            with pytest.raises(InputError, match=r"JAX_COORDINATOR_ADDRESS \(host:port\).*must all be set.*single"):
                start(load_config(config))


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@contextmanager
def two_processes(compile_cache: Path, *args: str | Path) -> Iterator[list[subprocess.Popen[str]]]:
    """`jaxpar train ARGS...` twice, joined over loopback, with half of the virtual devices each."""
    address = f"127.0.0.1:{free_port()}"
    together = {
        **os.environ,
        **quick_compiles_env(compile_cache),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
    }
    started = [
        subprocess.Popen(
            [Path(sys.executable).with_name("jaxpar"), "train", *args],
            env={**together, "JAX_PROCESS_ID": str(process_id)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process_id in (0, 1)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def write_eight(folder: Path) -> Path:
    """The tiny config on data 4 × tensor 2."""
    folder.mkdir()
    config = write_tiny(folder)
    config.write_text(config.read_text().replace("mesh: {data: 2, tensor: 2}", "mesh: {data: 4, tensor: 2}"))
    return config


@pytest.mark.slow
def test_two_processes_train_like_one(run_jaxpar, tmp_path: Path, compile_cache: Path):
    """Two processes with 4 devices each make the same steps, files and checkpoint as one with 8."""
    short = ["train.steps=2", "train.eval_every=2"]
    alone = run_jaxpar(["train", write_eight(tmp_path / "one"), *short], env=quick_compiles_env(compile_cache))
    assert alone.returncode == 0, alone.stderr
    with two_processes(compile_cache, write_eight(tmp_path / "two"), *short) as started:
        outputs = [process.communicate(timeout=120)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0], outputs
    assert "mesh: data 4 × pipe 1 × tensor 2 = 8 devices (cpu, 2 processes)" in outputs[0]
    assert "mesh: data" not in outputs[1]  # one of them talks
    assert len(list((tmp_path / "two/run/tokens").glob("*.tokens"))) == 1
    assert [path.name for path in (tmp_path / "two/run/checkpoints").iterdir()] == ["2"]
    one, two = metrics(tmp_path / "one/run"), metrics(tmp_path / "two/run")
    assert [line["step"] for line in two] == [1, 2]
    for name in ("loss", "grad_norm", "learning_rate", "validation_loss"):
        got, want = ([line[name] for line in lines if name in line] for lines in (two, one))
        # float32, summed in another order over the network: a few units in the last place, 6e-8 each.
        assert want and got == pytest.approx(want, rel=2e-6), name


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_after_the_same_step(tmp_path: Path, compile_cache: Path):
    config, run_dir = write_eight(tmp_path / "two"), tmp_path / "two" / "run"
    endless = ["train.steps=1_000_000", "train.eval_every=2", "checkpoint.every=null"]
    with two_processes(compile_cache, config, *endless) as started:
        give_up = time.monotonic() + 120
        while not ((run_dir / "metrics.jsonl").exists() and len(metrics(run_dir)) >= 2):
            assert time.monotonic() < give_up and all(process.poll() is None for process in started)
            time.sleep(0.1)
        started[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=120)[0] for process in started]
        assert [process.returncode for process in started] == [143, 143], outputs
    last = metrics(run_dir)[-1]["step"]
    assert f"stopped by SIGTERM after step {last}, which is saved" in outputs[0]
    with Checkpoints(run_dir / "checkpoints", keep=2) as checkpoints:
        assert checkpoints.steps() == [last]
