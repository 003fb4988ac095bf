"""Reading clusters, by name and from files, and what is said of wrong ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxpar.config import InputError
from jaxpar.hardware import DEVICES
from jaxpar.planner.cluster import BOUNDS, Cluster, Efficiency, parse_cluster
from jaxpar.planner.links import Span, collective_seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8xh100x8", ("H100", 8, 8)), ("a100x4", ("A100", 1, 4)), ("128xGB200x4", ("GB200", 128, 4))],
)
def test_names(text: str, expected: tuple[str, int, int]):
    cluster = parse_cluster(text)
    assert (cluster.device.name, cluster.hosts, cluster.per_host) == expected
    assert cluster.devices == expected[1] * expected[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xh10x8", ["no device is called h10", "Did you mean h100?"]),
        ("8xh100", ["must be hosts × devices", "devices a host has is missing, as in 8xh100x8."]),
        ("gb200x", ["devices a host has is missing, as in gb200x8."]),
        ("8xh100x8x2", ["must be hosts × devices. Write HOSTSxDEVICExCOUNT"]),
        ("0xh100x8", ["must be hosts × devices"]),
        ("64", ["must be hosts × devices"]),
        ("laptop", ["must be hosts × devices. Write HOSTSxDEVICExCOUNT"]),
        ("99999xh100x8", ["799,992 devices", "at most 2^17, 131,072"]),
        (f"{'9' * 5000}xh100x8", ["at most 2^17"]),
        ("nowhere.yaml", ["nowhere.yaml", "cannot be read"]),
    ],
)
def test_bad_names(text: str, said: list[str]):
    with pytest.raises(InputError) as error:
        parse_cluster(text)
    assert all(words in str(error.value) for words in said), error.value


def test_a_file_says_the_same(tmp_path):
    device = replace(DEVICES["H100"], network_bytes_per_second=12e9)
    matmul, all_reduce = {"bfloat16": ((1024.0, 0.4), (8192.0, 0.7))}, {"32x8": ((1024.0, 1e-4), (1048576.0, 2e-4))}
    wanted = Cluster(device, 4, 8, Efficiency(matmul=0.6), 0.9, matmul, all_reduce)
    path = tmp_path / "cluster.yaml"
    path.write_text(wanted.to_yaml())
    assert parse_cluster(str(path)) == wanted


def test_the_file_in_readme(tmp_path):
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Plan a layout")[2].partition("\n## ")[0]
    (tmp_path / "cluster.yaml").write_text(section.partition("```yaml\n")[2].partition("```")[0])
    cluster = parse_cluster(str(tmp_path / "cluster.yaml"))
    assert cluster.devices == 64 and cluster.device.network_bytes_per_second == 25e9
    assert (cluster.efficiency, cluster.usable) == (Efficiency(), Cluster.usable)


def test_measured_sizes_may_stand_in_any_order(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("device: h100\nhosts: 1\nper_host: 8\nmatmul: {bfloat16: [[8192, 0.7], [1024, 0.4]]}\n")
    assert parse_cluster(str(path)).matmul == {"bfloat16": ((1024.0, 0.4), (8192.0, 0.7))}


def test_measured_collectives_take_the_place_of_the_datasheet(tmp_path):
    rows = [
        {"axis": axis, "n": n, "per_host": 8, "op": "all-reduce", "algorithm": algorithm, "bytes": size, "seconds": s}
        for axis, n, algorithm, size, s in (
            ("data", 16, "native", 1024, 1e-3),
            ("data", 16, "native", 4096, 4e-3),
            ("data", 16, "ring", 1024, 1.0),
            ("tensor", 8, "native", 1024, 5e-4),
            ("data", 8, "native", 1024, 4e-4),  # the same group over another axis
        )
    ]
    path, measured = tmp_path / "cluster.yaml", tmp_path / "measured.json"
    measured.write_text(json.dumps({"rows": rows}))
    path.write_text("device: h100\nhosts: 2\nper_host: 8\ncollectives: measured.json\n")  # beside it
    cluster = parse_cluster(str(path))
    assert cluster.all_reduce == {"16x8": ((1024, 1e-3), (4096, 4e-3)), "8x8": ((1024, 5e-4),)}
    path.write_text(cluster.to_yaml())
    assert parse_cluster(str(path)) == cluster
    of = lambda op, size, n, hosts, algorithm="native": collective_seconds(op, algorithm, size, Span(n, hosts), cluster)
    assert of("all-reduce", 2048, 16, 2) == pytest.approx(2e-3)
    assert of("reduce-scatter", 2048, 16, 2) == of("all-gather", 2048, 16, 2) == pytest.approx(1e-3)
    assert of("all-reduce", 1024, 8, 1) == 5e-4
    model = parse_cluster("2xh100x8")  # of a group that was not measured
    assert of("all-reduce", 2048, 4, 1) == collective_seconds("all-reduce", "native", 2048, Span(4, 1), model)
    ring, native = (collective_seconds("all-reduce", a, 2048, Span(16, 2), model) for a in ("ring", "native"))
    assert of("all-reduce", 2048, 16, 2, "ring") == pytest.approx(2e-3 * ring / native)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (None, "measured.json: has no measurement."),
        ({"algorithm": "ring"}, "collectives = measured.json: has no measurement of native"),
        ({"seconds": 0}, "measured.json.16x8: sizes and seconds must be above 0"),
        ({"seconds": float("nan")}, "measured.json.16x8: sizes and seconds must be above 0 and finite"),
    ],
)
def test_collectives_that_say_nothing(tmp_path, row, said):
    good = {"axis": "data", "n": 16, "per_host": 8, "op": "all-reduce", "algorithm": "native", "bytes": 8, "seconds": 1}
    (tmp_path / "measured.json").write_text(json.dumps({"rows": [] if row is None else [good | row]}))
    path = tmp_path / "cluster.yaml"
    path.write_text("device: h100\nhosts: 2\nper_host: 8\ncollectives: measured.json\n")
    with pytest.raises(InputError) as refused:
        parse_cluster(str(path))
    assert said in str(refused.value)


def test_a_device_of_ones_own(tmp_path):
    path = tmp_path / "cluster.yaml"
    figures = "flops_per_second: 1.0e+14, memory_bytes: 64000000000, memory_bytes_per_second: 1.0e+12"
    path.write_text(f"device: mine\nhosts: 2\nper_host: 4\ndatasheet: {{{figures}}}\n")
    with pytest.raises(InputError, match="needs nvlink_bytes_per_second, network_bytes_per_second too"):
        parse_cluster(str(path))
    links = "nvlink_bytes_per_second: 1.0e+11, network_bytes_per_second: 1.0e+10"
    path.write_text(f"device: mine\nhosts: 2\nper_host: 4\ndatasheet: {{{figures}, {links}}}\n")
    assert parse_cluster(str(path)).device.network_bytes_per_second == 1e10


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("efficiency: {matmull: 0.5}", "Did you mean matmul?"),
        ("efficiency: {matmul: 1.5}", r"efficiency.matmul = 1.5: must be a number in \[0.2, 1\]"),
        ("usable: 2", r"usable = 2: must be a number in \[0.1, 1\]"),
        ("hosts: 0", "hosts = 0: must be a whole number"),
        ("hosts: true", "hosts = True: must be a whole number"),
        ("hosts: 16385", r"131,080 devices: a plan is for at most 2\^17"),
        ("matmul: {bfloat16: [1024, 7]}", "must be a list of"),
        ("matmul: {bfloat16: [[1024, true]]}", "must be a list of .* in numbers"),
        ("matmul: {bfloat16: [[1024, 7]]}", r"shares of the peak must be in \(0, 1\]"),
        ("matmul: {bfloat16: [[-1024, 0.7]]}", "must be above 0 and finite"),
        ("all_reduce: {large: [[1024, 7]]}", "must have keys like 64x8"),
        ("all_reduce: {64x8: [[1024, 0]]}", "all_reduce.64x8: sizes and seconds must be above 0"),
        ("collectives: nowhere.json", r"collectives = .*nowhere.json: cannot be read"),
        ("collectives: a.json\nall_reduce: {64x8: [[1024, 1.0]]}", "both given"),
        ("memory: 1\nmemory: 2", "stands twice"),
        ("matmul: {bfloat16: [[1024, 0.5], [2048, 0.6], [1024, 0.7]]}", "size 1024 stands there more than once"),
        (f"speed: {'[' * 5000}{']' * 5000}", "nested too deep"),
        ("datasheet: {memory: 5}", "unknown key memory"),
        ("speed: fast", "unknown key speed"),
    ],
)
def test_bad_files(tmp_path, line: str, said: str):
    path = tmp_path / "cluster.yaml"
    path.write_text(f"device: h100\nper_host: 8\n{line}\n" + ("" if "hosts" in line else "hosts: 1\n"))
    with pytest.raises(InputError, match=said):
        parse_cluster(str(path))


def test_a_file_that_lacks_its_size(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("device: h100\n")
    with pytest.raises(InputError, match="hosts, per_host missing"):
        parse_cluster(str(path))


def test_every_factor_has_bounds_that_hold_for_its_default():
    assert set(BOUNDS) == set(Efficiency.__dataclass_fields__)
    assert all(low <= getattr(Efficiency(), name) <= high for name, (low, high) in BOUNDS.items())


def test_equal_clusters_have_equal_hashes():
    assert hash(parse_cluster("8xh100x8")) == hash(parse_cluster("8xh100x8")) != hash(parse_cluster("4xh100x8"))
