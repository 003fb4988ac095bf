"""Machines that are not here: compiling for a cluster of NVIDIA GPUs, or for virtual CPU devices.

XLA compiles for a GPU from a description of it. The extra `aot` brings what that takes: JAX's CUDA plugin and
`ptxas`, without drivers. Such a program can be read and not run. There is no autotuning without the GPU, so kernels
may differ from those that it would run.
"""

import importlib.util
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxpar.config import InputError, MeshConfig
from jaxpar.mesh import make_mesh, stay_on_cpu, use_cpu_devices

CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  {fields}
}}
platform_name: "CUDA"
device_description_str: "{kind}"
"""
"""A GpuTargetConfigProto. XLA barely checks it: keep it as it is."""


@dataclass(frozen=True)
class Gpu:
    """What XLA has to know of a GPU, as in openxla/xla, `xla/backends/gpu/target_config/specs`."""

    kind: str
    fields: str


GPUS = {
    "A100": Gpu(
        "NVIDIA A100-SXM4-80GB",
        "core_count: 108  fpus_per_core: 64  clock_rate_ghz: 1.41  memory_bandwidth: 2039000000000 "
        "l2_cache_size: 41943040  device_memory_size: 85100068864 "
        "shared_memory_per_core: 167936  shared_memory_per_block_optin: 166912 "
        "cuda_compute_capability { major: 8 }  device_interconnect_info { active_links: 12 }",
    ),
    "H100": Gpu(
        "NVIDIA H100 80GB HBM3",
        "core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98  memory_bandwidth: 3352320000000 "
        "l2_cache_size: 52428800  device_memory_size: 84942979072 "
        "shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448 "
        "cuda_compute_capability { major: 9  feature_extension: ACCELERATED_FEATURES } "
        "device_interconnect_info { active_links: 18 }",
    ),
    "H200": Gpu(
        "NVIDIA H200",
        "core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98  memory_bandwidth: 4800000000000 "
        "l2_cache_size: 52428800  device_memory_size: 151397597184 "
        "shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448 "
        "cuda_compute_capability { major: 9  feature_extension: ACCELERATED_FEATURES } "
        "device_interconnect_info { active_links: 18 }",
    ),
    "B200": Gpu(
        "NVIDIA B200",
        "core_count: 148  fpus_per_core: 128  clock_rate_ghz: 1.965  memory_bandwidth: 7672320000000 "
        "l2_cache_size: 132644864  device_memory_size: 191514411008 "
        "shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448 "
        "cuda_compute_capability { major: 10  feature_extension: ACCELERATED_FEATURES } "
        "device_interconnect_info { active_links: 18 }",
    ),
}
ALIASES = {"A100-80": "A100"}
NAMES = "a100 (or a100-80), h100, h200, b200, cpu"


@dataclass(frozen=True)
class Target:
    """Which devices to compile for.

    Attributes:
        name: as the user wrote it.
        chip: a name in `GPUS`, or `CPU`.
        hosts: number of hosts.
        per_host: devices on each.
    """

    name: str
    chip: str
    hosts: int
    per_host: int

    @property
    def devices(self) -> int:
        """How many devices it has."""
        return self.hosts * self.per_host


def parse_target(text: str) -> Target:
    """Read `h100:8` (one host of 8), `h100:8x8` (8 hosts of 8) or `cpu:8`.

    Raises:
        InputError: when the device is not known or the numbers are not in this form.

    Example:
        >>> target = parse_target("h100:4x8")
        >>> target.chip, target.hosts, target.per_host, target.devices
        ('H100', 4, 8, 32)
    """
    form = re.fullmatch(r"([a-z0-9\-]+):(?:([1-9]\d*)x)?([1-9]\d*)", text.lower())
    if not form:
        raise InputError(
            f"--target {text}: write DEVICE:COUNT for one host, as h100:8, or DEVICE:HOSTSxCOUNT for several, as "
            f"h100:8x8 (8 hosts of 8). Devices: {NAMES}."
        )
    chip = ALIASES.get(form[1].upper(), form[1].upper())
    if chip not in GPUS and chip != "CPU":
        raise InputError(f"--target {text}: no device is called {form[1]}. Devices: {NAMES}.")
    if chip == "CPU" and form[2]:
        raise InputError(f"--target {text}: virtual CPU devices are all on one host. Use cpu:{form[3]}.")
    return Target(text, chip, int(form[2] or 1), int(form[3]))


def check_installed() -> None:
    """See that what compiling for an absent GPU takes is installed.

    Raises:
        InputError: names what to install.
    """
    pieces = {"jax_cuda12_plugin": "jax-cuda12-plugin", "nvidia.cuda_nvcc": "nvidia-cuda-nvcc-cu12"}
    missing = [package for module, package in pieces.items() if not _installed(module)]
    if missing:
        raise InputError(
            f"compiling for a GPU that is not here needs {' and '.join(missing)}, which is not installed. Install the "
            f"extra: pip install 'jaxpar[aot]' (in a checkout: pip install -e '.[aot]')."
        )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not there
        return False


def target_devices(target: Target) -> list[Any]:
    """The devices of a target, host by host: real virtual CPU devices, or GPUs that can only be compiled for.

    Raises:
        InputError: when the extra is not installed, or JAX already runs with fewer CPU devices.
    """
    if target.chip == "CPU":
        stay_on_cpu()
        use_cpu_devices(target.devices)
        return list(jax.devices("cpu")[: target.devices])
    check_installed()
    stay_on_cpu()
    gpu = GPUS[target.chip]
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology=f"{target.hosts}x1x{target.per_host}",
            target_config=CONFIG.format(fields=gpu.fields, kind=gpu.kind),
        )
    except NotImplementedError:  # JAX had started, and found no GPU, before it could be told to stay on the CPU
        raise InputError(
            f"JAX already runs, and can no longer be set up to compile for {target.name}. Restart the process (or "
            f"notebook kernel) and set JAX_PLATFORMS=cpu for it, or do this before anything touches JAX's devices."
        ) from None
    return list(topology.devices)


def target_mesh(target: Target, axes: MeshConfig) -> Mesh:
    """A mesh over all devices of a target, ordered as training would order them.

    Args:
        target: the devices.
        axes: resolved for as many.
    """
    return make_mesh(axes.data, axes.pipe, axes.tensor, devices=target_devices(target))


def compiler_options(target: Target | None) -> dict[str, Any]:
    """Compiler options for a GPU target; none for the CPU or this machine."""
    if target is None or target.chip == "CPU":
        return {}
    options: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}  # compiles several times faster
    if jax.__version_info__ >= (0, 11):
        # Small all-reduces become Triton kernels, which hide from the report; over 64 devices of one NVLink domain
        # that ends the process (seen in jax 0.12.0.1).
        options["xla_gpu_experimental_use_collective_kernels"] = ""
    return options
