"""The device mesh: axis names, device order, virtual CPU devices, and starting JAX.

The axes, from the slowest link to the fastest: `data` (gradients, once per step), `pipe` (activations between
stages), `tensor` (partial sums, several times per layer). Devices are ordered so that the last axis changes
fastest: neighbours on `tensor` share a host, and `data` is what crosses hosts.
"""

import importlib.util
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.config import Config, InputError

DATA, PIPE, TENSOR = "data", "pipe", "tensor"
AXES = (DATA, PIPE, TENSOR)
VOCAB_AXES = (PIPE, TENSOR)
"""The vocabulary is split over both, so that every pipeline stage shares the work of embedding and head."""


CPU_FLAGS = {
    # With XLA's concurrent order of operations, independent permutes of one program mix up each other's messages and
    # crash or hang (jax 0.10.2, seen with ring all-reduces of several buckets).
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
    # XLA aborts the process when a virtual device waits 40 seconds for the others, as on a busy machine.
    "xla_cpu_collective_call_terminate_timeout_seconds": "600",
}
"""What XLA needs to be told to run many virtual CPU devices on few cores."""


def set_cpu_flags() -> None:
    """Add `CPU_FLAGS` to XLA_FLAGS, except those that are set there. XLA reads them when its first device starts."""
    present = os.environ.get("XLA_FLAGS", "")
    added = [f"--{name}={value}" for name, value in CPU_FLAGS.items() if name not in present]
    os.environ["XLA_FLAGS"] = " ".join([present, *added]).strip()


def use_cpu_devices(count: int) -> None:
    """Give this process `count` virtual CPU devices. Call it before anything else touches JAX's devices.

    In a notebook this is the first cell; `jaxpar train` and the other commands call it by themselves. It does
    nothing to GPUs or TPUs, and nothing when JAX has, or will have, at least that many CPU devices.

    Args:
        count: number of virtual devices, at least 1.

    Raises:
        InputError: when JAX is already running with fewer.

    Example:
        >>> from jaxpar.mesh import use_cpu_devices
        >>> use_cpu_devices(8)
        >>> len(jax.devices("cpu")) >= 8
        True
    """
    set_cpu_flags()
    if "xla_force_host_platform_device_count" not in os.environ["XLA_FLAGS"]:
        if jax.config.jax_num_cpu_devices >= count:  # pyright: ignore[reportAttributeAccessIssue]  # no stub has it
            return
        try:
            jax.config.update("jax_num_cpu_devices", count)
            return
        except RuntimeError:  # JAX is already running: all that is left is to look whether it has enough
            pass
    running = len(jax.local_devices(backend="cpu"))
    if running < count:
        raise InputError(
            f"{count} CPU devices are needed, but JAX already runs with {running}. Virtual devices can only be made "
            f"before JAX starts: restart the process (or notebook kernel) and call use_cpu_devices({count}) first, "
            f"and take xla_force_host_platform_device_count out of XLA_FLAGS if it is set there."
        )


def stay_on_cpu() -> None:
    """Keep JAX off the GPUs of this machine, so that it can compile for others that are not there.

    With the CUDA plugin installed and no driver, JAX would look for a GPU and complain at length; told to use the CPU
    alone, it registers the plugin for compiling. Does nothing once JAX runs.
    """
    jax.config.update("jax_platforms", "cpu")


def make_mesh(data: int = 1, pipe: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """Build the mesh `(data, pipe, tensor)` with automatic axis types.

    Args:
        data: number of replicas.
        pipe: number of pipeline stages.
        tensor: number of devices that share each layer's matrices.
        devices: the devices to use; by default the first of `jax.devices()`, equally many of every process.

    Returns:
        A mesh whose devices are ordered by host, then by id, with `tensor` changing fastest.

    Raises:
        InputError: when there are fewer devices than the product, or `devices` is not exactly that many.

    Example:
        >>> mesh = make_mesh(data=4, tensor=2)
        >>> dict(mesh.shape)
        {'data': 4, 'pipe': 1, 'tensor': 2}
    """
    shape = (data, pipe, tensor)
    count = int(np.prod(shape))
    available = list(jax.devices() if devices is None else devices)
    if len(available) < count or (devices is not None and len(available) != count):
        raise InputError(
            f"mesh data {data} × pipe {pipe} × tensor {tensor} = {count} devices, but there are {len(available)}. "
            f"Change an axis, or on CPU call use_cpu_devices({count}) before JAX starts."
        )
    ordered = sorted(available, key=lambda d: (getattr(d, "slice_index", 0) or 0, d.process_index, d.id))
    if len(ordered) > count:
        ordered = _first_of_each_process(ordered, count)
    return Mesh(np.array(ordered).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _first_of_each_process(ordered: Sequence[Any], count: int) -> list[Any]:
    """`count` devices, equally many of every process: one without any could not take part in a step."""
    each = Counter(device.process_index for device in ordered)
    if count % len(each) or count // len(each) > min(each.values()):
        raise InputError(
            f"{count} of {len(ordered)} devices cannot be taken evenly from {len(each)} processes with {dict(each)} "
            f"devices. Use as many devices as there are, or a multiple of {len(each)}."
        )
    by_process = [[d for d in ordered if d.process_index == process] for process in each]
    return [device for devices in by_process for device in devices[: count // len(each)]]


def batch_spec(mesh: Mesh) -> P:
    """How the leading dim of a batch is laid out: over `data`, or not at all where that axis has one device."""
    return P(DATA) if mesh.shape[DATA] > 1 else P()


def shard_bytes(tree: Any) -> int:
    """Bytes that the arrays of a tree take on one device.

    Args:
        tree: arrays or `jax.ShapeDtypeStruct`s with shardings.

    Example:
        >>> over_tensor = jax.NamedSharding(make_mesh(tensor=4), jax.P("tensor"))
        >>> shard_bytes({"w": jax.ShapeDtypeStruct((8, 3), "float32", sharding=over_tensor)})
        24
    """
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)


def start(config: Config) -> tuple[Config, Mesh]:
    """Start JAX for a config: processes, virtual CPU devices, 64-bit types, and the mesh.

    Joins the other processes through `jax.distributed` when a launcher has set JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID. On CPU as many virtual devices are made as the mesh needs, the same number
    in every process.

    Returns:
        The config with an axis of -1 resolved, and its mesh.

    Raises:
        InputError: when the axes do not multiply to the number of devices, or the launcher's variables are not whole.
    """
    processes = _join_processes()
    axes = (config.mesh.data, config.mesh.pipe, config.mesh.tensor)
    wanted = config.mesh.devices or (int(np.prod(axes)) if min(axes) > 0 else None)
    if wanted and wanted % processes:
        raise InputError(
            f"the mesh has {wanted} devices, but {wanted} % {processes} processes = {wanted % processes}, must be 0: "
            f"all processes have equally many. Change an axis, or start another number of processes."
        )
    if wanted:
        use_cpu_devices(wanted // processes)
    use_config_dtypes(config)
    if _gpu_plugin_without_driver():
        stay_on_cpu()
    on_cpu = jax.default_backend() == "cpu"
    config = config.resolve_mesh(wanted if on_cpu and wanted else jax.device_count())
    return config, make_mesh(config.mesh.data, config.mesh.pipe, config.mesh.tensor)


def _gpu_plugin_without_driver() -> bool:
    """Whether JAX's CUDA plugin is there, as the extras `aot` and `test` bring it, and no NVIDIA driver."""
    drivers = ("/dev/nvidiactl", "/dev/dxg")  # Linux; Windows' Linux subsystem
    installed = importlib.util.find_spec("jax_cuda12_plugin") is not None
    return installed and "JAX_PLATFORMS" not in os.environ and not any(os.path.exists(path) for path in drivers)


def use_config_dtypes(config: Config) -> None:
    """Let JAX have 64-bit types where a config asks for them."""
    if "float64" in (config.train.param_dtype, config.train.compute_dtype):
        jax.config.update("jax_enable_x64", True)


def _join_processes() -> int:
    """Join the other processes if a launcher has started several; returns how many there are."""
    if jax.distributed.is_initialized():
        return jax.process_count()
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    values = {name: os.environ[name] for name in names if name in os.environ}
    if not values:
        return 1
    try:
        address, processes, process = values[names[0]], int(values[names[1]]), int(values[names[2]])
        if not 0 <= process < processes:
            raise ValueError
    except (KeyError, ValueError):
        raise InputError(
            f"to join several processes {names[0]} (host:port), {names[1]} (a number) and {names[2]} (0 up to that "
            f"number - 1) must all be set; the environment has {values}. For a single process set none of them."
        ) from None
    jax.distributed.initialize(address, processes, process)  # before anything that starts JAX's devices
    return processes
