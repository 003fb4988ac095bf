"""The machines that a plan is for: devices, hosts, links, and how much of their datasheets they reach.

Rates come from `jaxpar.hardware`. What a machine reaches of them are a few named factors with bounds, which
`jaxpar plan --fit` finds from measured steps and writes into a YAML file; such a file can be given in place of a name.

    device: h100              # a name in jaxpar.hardware, or with `datasheet` a new one
    hosts: 8
    per_host: 8
    usable: 0.95              # share of the memory that a program may fill
    efficiency: {matmul: 0.75, network: 1.0, ...}
    datasheet: {flops_per_second: ..., memory_bytes: ..., ...}   # figures that replace the device's
    matmul: {bfloat16: [[1024, 0.4], [8192, 0.8]]}               # measured: size of a cube, share of peak, in any order
    collectives: measured.json   # beside it: what `jaxpar bench collectives --output` wrote; native all-reduces count
    all_reduce: {64x8: [[1048576, 2.0e-4], ...]}    # in its place: devices x devices per host, bytes and seconds
"""

import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from jaxpar.collective_costs import read_measured
from jaxpar.config import InputError, yaml12
from jaxpar.hardware import DEVICES, Device
from jaxpar.planner.limits import check_devices

FORM = "HOSTSxDEVICExCOUNT, as 8xh100x8 (8 hosts of 8 H100), DEVICExCOUNT for one host, or the path of a YAML file"
DATASHEET = ("flops_per_second", "memory_bytes", "memory_bytes_per_second", "nvlink_bytes_per_second")
DATASHEET += ("network_bytes_per_second",)
Curve = tuple[tuple[float, float], ...]
"""What was measured for some sizes, ascending."""


@dataclass(frozen=True)
class Efficiency:
    """What a machine reaches, and its fixed costs. The defaults are for jaxpar's compiled programs.

    Attributes:
        matmul: share of the peak that large matrix multiplications reach.
        memory: share of the memory's rate that other operations reach.
        network: times the usual bandwidth between hosts (`jaxpar.planner.links`).
        latency: times the usual latency of a collective's hop between hosts.
        layer_seconds: least time of one layer, forward and backward, for one microbatch: what starting kernels takes.
        stage_layer_seconds: what that grows by for each device of `tensor` when stages lie on several hosts.
        hop_seconds: what a message to the next stage takes besides its bytes.
        step_seconds: once a step: the batch, the optimizer's kernels, logging.
    """

    matmul: float = 0.75
    memory: float = 0.8
    network: float = 1.0
    latency: float = 1.0
    layer_seconds: float = 3e-4
    stage_layer_seconds: float = 0.0
    hop_seconds: float = 2e-5
    step_seconds: float = 5e-3


BOUNDS: dict[str, tuple[float, float]] = {
    "matmul": (0.2, 1.0),
    "memory": (0.2, 1.0),
    "network": (0.1, 4.0),
    "latency": (0.1, 100.0),
    "layer_seconds": (1e-5, 1e-2),
    "stage_layer_seconds": (0.0, 1e-2),
    "hop_seconds": (0.0, 0.1),
    "step_seconds": (0.0, 0.5),
}
"""What each factor may be: in a file, and in a fit."""


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal devices.

    Attributes:
        device: datasheet figures of one device.
        hosts: number of hosts.
        per_host: devices on each.
        efficiency: what they reach.
        usable: share of the device's memory that a program may fill; CUDA, NCCL and the allocator take the rest.
        matmul: by dtype, measured (size, share of the peak) of cubes, ascending; where given, in place of the factor.
        all_reduce: by `devices x devices per host`, as `64x8`, measured (bytes, seconds) of native all-reduces,
            ascending; where given, in place of datasheet and factors.
    """

    device: Device
    hosts: int
    per_host: int
    efficiency: Efficiency = Efficiency()
    usable: float = 0.92
    matmul: Mapping[str, Curve] = field(default_factory=dict)
    all_reduce: Mapping[str, Curve] = field(default_factory=dict)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Made once: a search asks for it a hundred thousand times."""
        return hash((self.device, self.hosts, self.per_host, self.efficiency, self.usable))

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return self.hosts * self.per_host

    @property
    def usable_bytes(self) -> float:
        """Bytes of one device that a program may fill."""
        return self.usable * self.device.memory_bytes

    def to_yaml(self) -> str:
        """The cluster as a file that `parse_cluster` reads back."""
        values: dict[str, Any] = {
            "device": self.device.name.lower(),
            "hosts": self.hosts,
            "per_host": self.per_host,
            "usable": self.usable,
            "efficiency": {name: float(f"{value:.6g}") for name, value in asdict(self.efficiency).items()},
        }
        if self.device != DEVICES.get(self.device.name):
            values["datasheet"] = {name: getattr(self.device, name) for name in ("source", *DATASHEET)}
        for name in ("matmul", "all_reduce"):
            if curves := getattr(self, name):
                values[name] = {key: [list(point) for point in points] for key, points in curves.items()}
        return yaml12.dump(values)


def parse_cluster(text: str) -> Cluster:
    """Read `8xh100x8` (8 hosts of 8 H100), `h100x8` (one host), or a YAML file.

    Raises:
        InputError: when the device is not known, the text is in no such form, the file is not a cluster, or there are
            more devices than a plan is made for (`jaxpar.planner.limits`).

    Example:
        >>> cluster = parse_cluster("8xh100x8")
        >>> cluster.hosts, cluster.device.name, cluster.per_host, cluster.devices
        (8, 'H100', 8, 64)
    """
    if text.lower().endswith((".yaml", ".yml")):
        return _from_file(text)
    form = re.fullmatch(r"(?:([1-9]\d*)x)?([a-z][a-wyz0-9\-]*)x([1-9]\d*)", text.lower())
    if not form:
        lacks = re.fullmatch(r"([1-9]\d*x)?([a-z][a-wyz0-9\-]*)x?", text.lower())
        known = lacks and lacks[2].upper() in DEVICES
        hint = f" How many devices a host has is missing, as in {text.rstrip('xX')}x8." if known else ""
        raise InputError(f"--cluster {text}: must be hosts × devices.{hint} Write {FORM}.")
    hosts, per_host = (min(int(digits[:20]), 2**60) for digits in (form[1] or "1", form[3]))  # int() refuses long ones
    check_devices(hosts * per_host, f"--cluster {text}")
    return Cluster(_device(form[2], f"--cluster {text}"), hosts, per_host)


def _device(name: str, where: str) -> Device:
    if name.upper() not in DEVICES:
        near = difflib.get_close_matches(name.upper(), DEVICES, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0].lower()}?" if near else ""
        raise InputError(f"{where}: no device is called {name}. Devices: {', '.join(DEVICES).lower()}.{hint}")
    return DEVICES[name.upper()]


def _from_file(path: str) -> Cluster:
    try:
        values = yaml12.load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--cluster {path}: cannot be read: {getattr(error, 'strerror', error)}.") from None
    except (yaml.YAMLError, ValueError) as error:  # the latter: no such date, a number of thousands of digits
        raise InputError(f"--cluster {path}: is not YAML: {getattr(error, 'problem', error)}.") from None
    except RecursionError:
        raise InputError(f"--cluster {path}: is nested too deep for a cluster.") from None
    keys = {"device", "hosts", "per_host", "usable", "efficiency", "datasheet", "matmul", "all_reduce", "collectives"}
    _check_keys(path, "the file", values, keys, needed={"device", "hosts", "per_host"})
    for name in ("hosts", "per_host"):
        if isinstance(values[name], bool) or not isinstance(values[name], int) or values[name] < 1:
            raise InputError(f"{path}: {name} = {values[name]}: must be a whole number, at least 1.")
    check_devices(values["hosts"] * values["per_host"], path)
    efficiency = values.get("efficiency") or {}
    _check_keys(path, "efficiency", efficiency, set(BOUNDS))
    for name, value in efficiency.items():
        _check_number(path, f"efficiency.{name}", value, *BOUNDS[name])
    usable = values.get("usable", Cluster.usable)
    _check_number(path, "usable", usable, 0.1, 1.0)
    return Cluster(
        _datasheet(path, values),
        values["hosts"],
        values["per_host"],
        Efficiency(**efficiency),
        usable,
        _matmul(path, values.get("matmul") or {}),
        _all_reduce(path, values),
    )


def _datasheet(path: str, values: Mapping[str, Any]) -> Device:
    own = values.get("datasheet") or {}
    _check_keys(path, "datasheet", own, {"source", *DATASHEET})
    for name in own.keys() - {"source"}:
        _check_number(path, f"datasheet.{name}", own[name], 1.0, 1e18)
    if str(values["device"]).upper() in DEVICES or not own:
        return replace(_device(str(values["device"]), path), **own)
    missing = [f.name for f in fields(Device) if f.name not in {"name", "source", *own}]
    if missing:
        raise InputError(
            f"{path}: device {values['device']} is not known, so datasheet needs {', '.join(missing)} too."
        )
    return Device(name=str(values["device"]), **{"source": path, **own})


def _matmul(path: str, curves: Any) -> dict[str, Curve]:
    _check_keys(path, "matmul", curves, {"bfloat16", "float32"})
    found = {dtype: _curve(f"{path}: matmul.{dtype}", "share of the peak", points) for dtype, points in curves.items()}
    for dtype, points in found.items():
        if any(share > 1 for _, share in points):
            raise InputError(f"{path}: matmul.{dtype}: shares of the peak must be in (0, 1].")
    return found


def _all_reduce(path: str, values: Mapping[str, Any]) -> dict[str, Curve]:
    """Measured all-reduces, written out or in the file that `jaxpar bench collectives` wrote."""
    curves, file = values.get("all_reduce") or {}, values.get("collectives")
    if curves and file:
        raise InputError(f"{path}: all_reduce and collectives are both given, and say the same. Give one.")
    if file:
        measured = read_measured(Path(path).parent / str(file), None, f"{path}: collectives").seconds_by_size
        # The same group may have been measured over two axes: the longer time counts.
        longest = {(n, g): dict(points) for (_, name, n, g), points in measured.items() if name == "native"}
        if not longest:
            raise InputError(f"{path}: collectives = {file}: has no measurement of native.")
        curves = {f"{n}x{g}": [list(point) for point in points.items()] for (n, g), points in longest.items()}
    if not isinstance(curves, dict) or not all(re.fullmatch(r"[1-9]\d*x[1-9]\d*", str(key)) for key in curves):
        raise InputError(f"{path}: all_reduce: must have keys like 64x8, devices x devices per host.")
    where = f"{path}: collectives = {file}" if file else f"{path}: all_reduce"
    return {key: _curve(f"{where}.{key}", "seconds", points) for key, points in curves.items()}


def _curve(where: str, what: str, points: Any) -> Curve:
    """Pairs of a size and what was measured for it, ascending."""
    pairs = isinstance(points, list) and all(isinstance(p, list | tuple) and len(p) == 2 for p in points)
    if not pairs or not points or not all(_is_number(x) and _is_number(y) for x, y in points):
        raise InputError(f"{where}: must be a list of [size, {what}], in numbers.")
    if not all(0 < x < math.inf and 0 < y < math.inf for x, y in points):
        raise InputError(f"{where}: sizes and {what} must be above 0 and finite.")
    sizes = [x for x, _ in points]
    if twice := [x for x in sizes if sizes.count(x) > 1]:
        raise InputError(f"{where}: size {twice[0]:g} stands there more than once; leave one.")
    return tuple(sorted((float(x), float(y)) for x, y in points))


def _check_keys(path: str, where: str, values: Any, known: set[str], needed: Collection[str] = ()) -> None:
    if not isinstance(values, dict):
        raise InputError(f"{path}: {where} must hold keys: {', '.join(sorted(known))}.")
    for key in values.keys() - known:
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f" Did you mean {near[0]}?" if near else f" Known: {', '.join(sorted(known))}."
        raise InputError(f"{path}: {where} has an unknown key {key}.{hint}")
    if missing := sorted(set(needed) - values.keys()):
        raise InputError(f"{path}: {', '.join(missing)} missing.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_number(path: str, key: str, value: Any, low: float, high: float) -> None:
    if not _is_number(value) or not low <= value <= high:
        raise InputError(f"{path}: {key} = {value}: must be a number in [{low:g}, {high:g}].")
