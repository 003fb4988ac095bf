"""Closed forms against the printed digits of the papers they come from."""

import json
from pathlib import Path

import pytest

from jaxpar.config import InputError
from jaxpar.planner.formulas import activation_bytes, gpt_flops, gpt_parameters, zero_bytes

TABLES = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "planner" / "reference_tables.json").read_text(encoding="utf-8")
)


def printed(value: float, digits: str) -> bool:
    """Whether a value rounds to what is printed, to as many digits as are printed; the last may be cut or rounded."""
    decimals = len(digits.partition(".")[2])
    return abs(value - float(digits)) < 10.0**-decimals


@pytest.mark.parametrize("size", ["7.5B", "128B", "1T"])
@pytest.mark.parametrize(("stage", "name"), [(1, "pos"), (2, "pos_g"), (3, "pos_g_p")])
def test_zero_table_1(size: str, stage: int, name: str):
    table = TABLES["zero_table1_gb"]
    parameters = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}[size]
    for replicas, gigabytes in zip(table["dp"], table[size][name], strict=True):
        found = zero_bytes(parameters, replicas, stage) / 1e9
        assert printed(found, str(gigabytes)), (replicas, found, gigabytes)


def test_zero_closed_forms():
    for d in (1, 3, 64):
        assert [zero_bytes(1.0, d, stage) for stage in range(4)] == pytest.approx([16, 4 + 12 / d, 2 + 14 / d, 16 / d])


def test_parameters_of_sc21():
    for params_b, _, width, layers, *_ in TABLES["megatron_sc21_table1"]["rows"]:
        found = gpt_parameters(layers, width, 51200, 2048) / 1e9
        assert printed(found, str(params_b)), (found, params_b)


def test_flops_of_sc21():
    B, s, L, h, V = 4, 2048, 24, 2304, 51200
    full = gpt_flops(B, s, L, h, V, recompute=True)
    assert full == pytest.approx(96 * B * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h)))
    plain = gpt_flops(B, s, L, h, V, recompute=False)
    assert plain == pytest.approx(72 * B * s * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h)))


def test_activation_formulas():
    s, b, h, a, t = 2048, 3, 6144, 64, 8
    sbh, pairs = s * b * h, 5 * a * s / h
    of = lambda **options: activation_bytes(s, b, h, a, **options)
    assert of() == pytest.approx(sbh * (34 + pairs))
    assert of(tensor=t) == pytest.approx(sbh * (10 + 24 / t + pairs / t))
    assert of(tensor=t, sequence_parallel=True) == pytest.approx(sbh * (34 / t + pairs / t))
    assert of(tensor=t, sequence_parallel=True, recompute="selective") == pytest.approx(34 * sbh / t)
    assert of(tensor=t, recompute="selective") == pytest.approx(sbh * (10 + 24 / t))
    assert of(tensor=t, recompute="full") == 2 * sbh
    with pytest.raises(InputError, match="must be one of none, selective, full"):
        of(recompute="some")
