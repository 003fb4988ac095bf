"""Naming a machine that is not here, and what is said when that cannot be."""

import importlib.util

import jax
import pytest
from test_compiling import config

from jaxpar.config import InputError
from jaxpar.hardware import DEVICES
from jaxpar.inspect import compile_step, targets
from jaxpar.inspect.targets import GPUS, compiler_options, parse_target, target_devices


@pytest.mark.parametrize(
    ("text", "chip", "hosts", "per_host"),
    [("h100:8", "H100", 1, 8), ("H100:8x4", "H100", 8, 4), ("a100-80:2", "A100", 1, 2), ("cpu:8", "CPU", 1, 8)],
)
def test_targets(text: str, chip: str, hosts: int, per_host: int):
    target = parse_target(text)
    assert (target.chip, target.hosts, target.per_host, target.devices) == (chip, hosts, per_host, hosts * per_host)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h100", "DEVICE:COUNT"),
        ("h100:0", "DEVICE:COUNT"),
        ("h100:8x8x8", "DEVICE:COUNT"),
        ("h300:8", "no device is called h300. Devices: a100 (or a100-80), h100, h200, b200, cpu"),
        ("cpu:2x4", "Use cpu:4"),
    ],
)
def test_unknown_targets_are_named(text: str, said: str):
    with pytest.raises(InputError) as error:
        parse_target(text)
    assert said in str(error.value) and f"--target {text}" in str(error.value)


@pytest.mark.parametrize("module", ["jax_cuda12_plugin", "nvidia.cuda_nvcc"])
def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, module: str):
    find = importlib.util.find_spec
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None if name == module else find(name))
    with pytest.raises(InputError, match=r"pip install 'jaxpar\[aot\]'"):
        compile_step(config((2, 4)), "h100:8")


def test_a_mesh_that_does_not_fill_the_target():
    with pytest.raises(InputError, match=r"mesh.data 2 × mesh.pipe 1 × mesh.tensor 4 = 8"):
        compile_step(config((2, 4)), "h100:8x8")
    with pytest.raises(InputError, match=r"mesh.devices = 8, but h100:2x8 has 16 devices"):
        settings = config((2, 4))
        compile_step(settings.model_copy(update={"mesh": settings.mesh.model_copy(update={"devices": 8})}), "h100:2x8")


@pytest.mark.parametrize("chip", list(GPUS))
def test_the_plugin_knows_every_target(chip: str):
    """Each compiles a multiplication, its memory agrees with the hardware table, and hosts are told apart."""
    target = parse_target(f"{chip.lower()}:2x2")
    devices = target_devices(target)
    assert [device.process_index for device in devices] == [0, 0, 1, 1]
    assert chip in devices[0].device_kind
    assert f"device_memory_size: {DEVICES[chip].memory_bytes} " in GPUS[chip].fields
    x = jax.ShapeDtypeStruct((64, 64), "bfloat16", sharding=jax.sharding.SingleDeviceSharding(devices[0]))
    compiled = jax.jit(lambda x: x @ x).lower(x).compile(compiler_options=compiler_options(target))
    assert "cublas" in compiled.as_text()
