"""The table of devices against facts that nobody here wrote, and finding a device by its kind."""

import pytest

from jaxpar.hardware import DEVICES, find


@pytest.mark.parametrize(
    ("name", "teraflops", "gigabytes", "memory_terabytes", "nvlink_gigabytes", "network_gigabits"),
    [
        ("A100", 312, 80, 2.0, 300, 200),
        ("H100", 989, 80, 3.35, 450, 400),
        ("H200", 989, 141, 4.8, 450, 400),
        ("B200", 2250, 180, 8, 900, 400),
        ("GB200", 2500, 186, 8, 900, 400),
        ("B300", 2250, 288, 8, 900, 800),
    ],
)
def test_figures(name, teraflops, gigabytes, memory_terabytes, nvlink_gigabytes, network_gigabits):
    device = DEVICES[name]
    assert device.flops_per_second == teraflops * 1e12
    assert device.memory_bytes == pytest.approx(gigabytes * 1e9, rel=0.08)  # a marketing gigabyte is 1e9 or 2^30
    assert device.memory_bytes_per_second == pytest.approx(memory_terabytes * 1e12, rel=0.05)
    assert device.nvlink_bytes_per_second == nvlink_gigabytes * 1e9
    assert device.network_bytes_per_second == network_gigabits * 1e9 / 8


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("cpu", None),
    ],
)
def test_finding_a_device(kind: str, name: str | None):
    assert find(kind) == (DEVICES[name] if name else None)
