"""`jaxpar compile` as a user runs it."""

import json
import time
from pathlib import Path

import pytest

from jaxpar.config import load_config
from jaxpar.inspect import printing

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = ["model.hidden_size=32", "model.intermediate_size=48", "model.num_hidden_layers=2", "data.sequence_length=16"]
SMALL += ["mesh.data=4", "mesh.pipe=1", "mesh.tensor=2", "parallel.chunks=1", "parallel.microbatches=2"]
MEMORY_KEYS = {
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "batch_bytes",
    "arguments_bytes",
    "outputs_bytes",
    "temp_bytes",
    "peak_bytes",
    "device_bytes",
    "overshoot_bytes",
}
ROW_KEYS = {
    "op",
    "axes",
    "count_per_step",
    "buffer_bytes_per_step",
    "wire_bytes_per_step",
    "seconds_per_step",
    "hidden_fraction",
    "crosses_hosts",
}


def test_json_hlo_and_picture(run_jaxpar, tmp_path: Path):
    args = ["compile", CONFIGS / "quickstart.yaml", *SMALL, "--target", "h100:8", "--json"]
    result = run_jaxpar([*args, "--hlo", tmp_path / "step.txt", "--plot", tmp_path / "step.png"])
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert {"target", "mesh", "memory", "collectives", "flops_per_step", "compile_seconds"} <= set(report)
    assert report["target"] == "h100:8" and report["mesh"] == {"data": 4, "pipe": 1, "tensor": 2}
    assert set(report["memory"]) == MEMORY_KEYS and report["compile_seconds"] > 0
    assert all(set(row) == ROW_KEYS for row in report["collectives"])
    assert {tuple(row["axes"]) for row in report["collectives"]} == {("data",), ("tensor",)}
    assert (tmp_path / "step.txt").read_text().startswith("HloModule jit_train_step")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_for_people(run_jaxpar):
    result = run_jaxpar(["compile", CONFIGS / "quickstart.yaml", *SMALL, "mesh.data=8", "mesh.tensor=1"])
    assert result.returncode == 0, result.stderr
    for words in ("mesh data 8 × pipe 1 × tensor 1", "optimizer state", "all-reduce", "traced in", "compiled in"):
        assert words in result.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--target", "h300:8"], "no device is called h300"),
        (["--target", "h100:16"], "= 8"),
        (["--xla", "nonsense"], "--xla nonsense: write NAME=VALUE"),
        (["--hlo", "missing/step.txt"], "there is no folder missing"),
    ],
)
def test_wrong_input(run_jaxpar, tmp_path: Path, args: list[str], said: str):
    result = run_jaxpar(["compile", CONFIGS / "quickstart.yaml", *args], cwd=tmp_path)
    assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_model_that_does_not_fit(run_jaxpar):
    args = ["compile", CONFIGS / "llama_8b_8xh100.yaml", "--target", "h100:8", "mesh.data=8", "mesh.tensor=1"]
    result = run_jaxpar([*args, "parallel.microbatches=4", "--json"])
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    memory = report["memory"]
    assert not report["fits"] and memory["device_bytes"] == 84_942_979_072
    assert memory["parameters_bytes"] == 4 * 8_030_261_248  # Llama 3 8B, all of it on every device
    assert memory["overshoot_bytes"] == memory["peak_bytes"] - memory["device_bytes"] > 40e9


@pytest.mark.slow
def test_70b_on_64_devices_as_its_config_says(run_jaxpar):
    file = CONFIGS / "llama_70b_64xh100.yaml"
    start = time.monotonic()
    result = run_jaxpar(["compile", file, "--target", "h100:8x8", "--json"])
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - start < 300
    report = json.loads(result.stdout)
    gigabytes = float(file.read_text().split("Memory: ")[1].split(" GB")[0])
    assert report["memory"]["peak_bytes"] == pytest.approx(gigabytes * 1e9, rel=0.05)  # compilers differ a little
    assert report["memory"]["parameters_bytes"] == pytest.approx(4 * 70.55e9 / 64, rel=0.002)  # norms are not split


@pytest.mark.parametrize("name", ["llama_8b_8xh100.yaml", "llama_70b_64xh100.yaml"])
def test_gpu_configs_open_with_their_command_and_what_it_said(name: str):
    text = (CONFIGS / name).read_text()
    head = text[: text.index("\nmodel:")]
    assert f"jaxpar compile configs/{name} --target h100:" in head
    assert "Memory: " in head and "binding" in head
    load_config(CONFIGS / name)


def test_what_does_not_fit_is_said():
    from jaxpar.inspect.memory import Memory

    text = str(printing.fit(Memory(0, 0, 100_000_000_000, 100_000_000_000, device_bytes=80_000_000_000)))
    assert text == "Does not fit: 20 GB too much, it takes 125% of the device's memory."
