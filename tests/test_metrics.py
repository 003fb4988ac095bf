"""metrics.jsonl through kills and resumes, non-finite numbers, TensorBoard, and the step clock."""

import importlib
import json
import logging
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import InputError
from jaxpar.metrics import MetricsWriter, StepClock, peak_memory_bytes


def lines(folder: Path) -> list[dict]:
    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_every_call_is_a_line_at_once(tmp_path: Path):
    with MetricsWriter(tmp_path / "run", tensorboard=False) as writer:
        writer.write(1, {"loss": jnp.float32(2.5), "tokens": np.int64(4096), "skipped": False, "note": "first"})
        assert lines(tmp_path / "run") == [{"step": 1, "loss": 2.5, "tokens": 4096, "skipped": False, "note": "first"}]
        writer.write(2, {"loss": jnp.bfloat16(1.25)})
        assert lines(tmp_path / "run")[1] == {"step": 2, "loss": 1.25}


def test_nonfinite_numbers_are_null_and_named(tmp_path: Path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(7, {"loss": jnp.float32(jnp.nan), "lr": 0.1, "grad_norm": np.float64(-np.inf)})
    assert lines(tmp_path) == [
        {"step": 7, "loss": None, "lr": 0.1, "grad_norm": None, "nonfinite": ["loss", "grad_norm"]}
    ]


def test_resume_drops_later_steps_and_a_cut_line(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": 1.0 / step})
    whole = (tmp_path / "metrics.jsonl").read_text()
    for cut in (0, 1, 9, 17):  # characters that the kill kept of the line of step 6
        (tmp_path / "metrics.jsonl").write_text(whole + '{"step": 6, "loss": 0.17}'[:cut])
        with caplog.at_level(logging.WARNING), MetricsWriter(tmp_path, tensorboard=False, resume_step=3) as writer:
            writer.write(4, {"loss": 0.25})
        assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
        assert bool(caplog.records) == (cut > 0)
        caplog.clear()
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=4):
        assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    with MetricsWriter(tmp_path, tensorboard=False):  # a new run in the folder
        assert lines(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_only_process_0_writes(tmp_path: Path):
    with MetricsWriter(tmp_path / "run", tensorboard=True, process_index=1) as writer:
        writer.write(1, {"loss": 1.0})
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_the_same_numbers(tmp_path: Path):
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(3, {"loss": jnp.float32(1.5), "note": "text"})
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes() and np.float32(1.5).tobytes() in events.read_bytes()


def test_missing_tensorboard_says_how_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(name: str):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(InputError, match=r'pip install "jaxpar\[tensorboard\]"'):
        MetricsWriter(tmp_path, tensorboard=True)


def test_full_disk_is_an_input_error(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"loss": 1.0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
        try:
            with pytest.raises(InputError, match=r"metrics\.jsonl cannot be written: File too large"):
                writer.write(2, {"loss": 0.5, "grad_norm": 3.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=1):
        assert lines(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_clock_rates_and_left_out_time():
    clock = StepClock(flops_per_token=3 * 10**6, peak_flops_per_second=1e9, devices=4)
    assert clock.read(10, 1000, now=5.0) == {}
    assert clock.read(11, 1200, now=7.0) == {"tokens_per_second": 100.0, "step_seconds": 2.0, "mfu": 0.075}
    clock.leave_out(6.0)
    assert clock.read(15, 2000, now=21.0) == {"tokens_per_second": 100.0, "step_seconds": 2.0, "mfu": 0.075}
    unknown = StepClock(flops_per_token=1, peak_flops_per_second=None, devices=1)
    unknown.leave_out(1.0)
    unknown.read(0, 0, now=0.0)
    assert unknown.read(1, 8, now=2.0) == {"tokens_per_second": 4.0, "step_seconds": 2.0}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_on_cpu_is_the_process():
    status = Path("/proc/self/status").read_text()
    (peak,) = (int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak_memory_bytes() == pytest.approx(peak, rel=0.02)  # the kernel adds up resident pages with a delay


def test_peak_memory_on_accelerators_is_the_greatest_allocator_peak(monkeypatch: pytest.MonkeyPatch):
    peaks = [
        SimpleNamespace(memory_stats=lambda n=n: {"peak_bytes_in_use": n, "bytes_in_use": 3 * n}) for n in (5, 7, 6)
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: peaks)
    assert peak_memory_bytes() == 7
