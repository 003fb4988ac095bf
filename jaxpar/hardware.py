"""What the devices can do, from their makers' datasheets; imports no JAX.

All rates are per device and in one direction. Datasheets often print matrix rates "with sparsity", twice the dense
rate that a transformer sees, and link rates as the sum of both directions; here are the dense rate and one direction.
Memory is what the driver of that device reports where that is known: a little is taken by CUDA itself, and JAX's
allocator starts with a share of it (three quarters, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise).
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Datasheet figures of one accelerator.

    Attributes:
        name: the word in a device kind that names the chip.
        source: where the rates are printed.
        flops_per_second: dense bfloat16 matrix multiplication.
        memory_bytes: size of its memory.
        memory_bytes_per_second: rate of its memory.
        nvlink_bytes_per_second: to the other devices of its host.
        network_bytes_per_second: its share of the host's usual network adapters.
    """

    name: str
    source: str
    flops_per_second: float
    memory_bytes: int
    memory_bytes_per_second: float
    nvlink_bytes_per_second: float
    network_bytes_per_second: float


DEVICES = {
    device.name: device
    for device in (
        Device(
            name="A100",
            source="NVIDIA A100 80GB SXM datasheet",
            flops_per_second=312e12,  # datasheet: 312 dense, 624 with sparsity
            memory_bytes=85_100_068_864,  # driver, as in openxla/xla target_config/specs/a100_sxm_80
            memory_bytes_per_second=2.039e12,  # datasheet
            nvlink_bytes_per_second=300e9,  # datasheet: 600 GB/s both ways
            network_bytes_per_second=25e9,  # NVIDIA DGX A100 datasheet: one 200 Gb/s adapter per GPU
        ),
        Device(
            name="H100",
            source="NVIDIA H100 SXM datasheet",
            flops_per_second=989e12,  # datasheet: 1,979 with sparsity, halved
            memory_bytes=84_942_979_072,  # driver, as in openxla/xla target_config/specs/h100_sxm
            memory_bytes_per_second=3.35e12,  # datasheet
            nvlink_bytes_per_second=450e9,  # datasheet: 900 GB/s both ways
            network_bytes_per_second=50e9,  # NVIDIA DGX H100 datasheet: one 400 Gb/s adapter per GPU
        ),
        Device(
            name="H200",
            source="NVIDIA H200 SXM datasheet",
            flops_per_second=989e12,  # datasheet: 1,979 with sparsity, halved
            memory_bytes=151_397_597_184,  # driver, as in openxla/xla target_config/specs/h200
            memory_bytes_per_second=4.8e12,  # datasheet
            nvlink_bytes_per_second=450e9,  # datasheet: 900 GB/s both ways
            network_bytes_per_second=50e9,  # NVIDIA DGX H200 datasheet: one 400 Gb/s adapter per GPU
        ),
        Device(
            name="B200",
            source="NVIDIA HGX B200 datasheet",
            flops_per_second=2250e12,  # datasheet: 36,000 with sparsity for 8 GPUs
            memory_bytes=191_514_411_008,  # driver, as in openxla/xla target_config/specs/b200
            memory_bytes_per_second=7.7e12,  # datasheet: 62 TB/s for 8 GPUs
            nvlink_bytes_per_second=900e9,  # datasheet: 1.8 TB/s both ways
            network_bytes_per_second=50e9,  # NVIDIA DGX B200 datasheet: one 400 Gb/s adapter per GPU
        ),
        Device(
            name="GB200",
            source="NVIDIA GB200 NVL72 datasheet",
            flops_per_second=2500e12,  # datasheet: 360,000 with sparsity for 72 GPUs
            memory_bytes=186_000_000_000,  # datasheet: 13.4 TB for 72 GPUs
            memory_bytes_per_second=8e12,  # datasheet: 576 TB/s for 72 GPUs
            nvlink_bytes_per_second=900e9,  # datasheet: 1.8 TB/s both ways
            network_bytes_per_second=50e9,  # NVIDIA DGX GB200 datasheet: one 400 Gb/s adapter per GPU
        ),
        Device(
            name="B300",
            source="NVIDIA HGX B300 datasheet",
            flops_per_second=2250e12,  # datasheet: 36,000 with sparsity for 8 GPUs
            memory_bytes=288_000_000_000,  # datasheet: 2.3 TB for 8 GPUs
            memory_bytes_per_second=8e12,  # datasheet: 64 TB/s for 8 GPUs
            nvlink_bytes_per_second=900e9,  # datasheet: 1.8 TB/s both ways
            network_bytes_per_second=100e9,  # NVIDIA DGX B300 datasheet: one 800 Gb/s adapter per GPU
        ),
    )
}
SLOWER_BOARDS = {"H100": ("PCIE", "NVL"), "H200": ("NVL",)}  # same chip name, other figures: not listed
SHARE_OF_PEAK = {"bfloat16": 1.0, "float16": 1.0, "float32": 0.5}  # float32 in TF32, half of bf16 on all listed chips


def find(device_kind: str) -> Device | None:
    """Look up a device by what `jax.devices()[0].device_kind` says.

    Example:
        >>> find("NVIDIA H100 80GB HBM3").memory_bytes_per_second
        3350000000000.0
        >>> find("cpu") is None
        True
    """
    words = re.split(r"[^A-Z0-9]+", device_kind.upper())
    names = [name for name in DEVICES if name in words]
    if len(names) != 1 or set(words) & set(SLOWER_BOARDS.get(names[0], ())):
        return None
    return DEVICES[names[0]]
