"""`verify` must find mistakes: each test here makes one on purpose."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxpar import gradients, verify, zero
from jaxpar.collectives import axis_size
from jaxpar.layers import linear
from jaxpar.mesh import make_mesh
from tests.test_step import config


@pytest.fixture
def mesh():
    return make_mesh(data=2, tensor=2)


SETTINGS = {"model": {"num_hidden_layers": 1}, "optimizer": {"name": "adamw"}}


def test_a_right_program_passes(mesh):
    report = verify.compare(config((2, 1, 2), **SETTINGS), mesh)
    assert report.ok and report.tolerance == 1e-9
    kinds = [c.kind for c in report.comparisons]
    assert kinds.count("gradient") == kinds.count("updated parameter") == 12 and kinds.count("value") == 3


def test_a_constant_factor_that_adam_hides_is_found(mesh, monkeypatch):
    land = zero.Replicas.land

    def twice(self, *args):
        loss, tokens, grads = land(self, *args)
        return loss, tokens, jax.tree.map(lambda g: 2 * g, grads)

    monkeypatch.setattr(zero.Replicas, "land", twice)
    report = verify.compare(config((2, 1, 2), **SETTINGS), mesh)
    assert not report.ok
    wrong = {c.kind for c in report.comparisons if c.error > report.tolerance}
    assert {"gradient", "value"} <= wrong
    assert report.comparisons[0].error == pytest.approx(1.0)


def test_a_missing_sum_of_one_parameter_is_named(mesh, monkeypatch):
    """The bias of a row parallel layer added before the sum counts once for each device."""
    whole = linear.RowParallelLinear.__call__

    def bias_before_sum(self, x):
        out = whole(self, x)
        return out if self.bias is None else out + self.bias[...] * (axis_size("tensor") - 1)

    monkeypatch.setattr(linear.RowParallelLinear, "__call__", bias_before_sum)
    settings = config((2, 1, 2), model={"num_hidden_layers": 1, "mlp_bias": True})
    report = verify.compare(settings, mesh)
    wrong = [c.name for c in report.comparisons if c.error > 0.5]
    assert not report.ok and "blocks.mlp.down.bias" in wrong


def test_mean_over_replicas_instead_of_tokens_is_found(mesh, monkeypatch):
    """Replicas with different numbers of unmasked tokens must not count alike."""
    real = gradients.make_loss

    def mean_of_replicas(*args, **kwargs):
        loss = real(*args, **kwargs)

        def wrong(*args):
            total, tokens = loss(*args)
            return total / tokens, tokens / tokens

        return wrong

    monkeypatch.setattr(gradients, "make_loss", mean_of_replicas)
    assert not verify.compare(config((2, 1, 2), **SETTINGS), mesh).ok


def test_not_a_number_is_an_infinite_error():
    assert verify._error(np.array([np.nan]), np.array([1.0])) == float("inf")


def test_json_report_and_verdict(mesh, capsys):
    assert verify.run(config((2, 1, 2), **SETTINGS), mesh, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["mesh"] == {"data": 2, "pipe": 1, "tensor": 2}
    assert set(report) == {f.name for f in dataclasses.fields(verify.Report)}


def test_command_exits_1_when_the_two_differ(run_jaxpar, tmp_path):
    """With a tolerance of nothing at all, rounding is a difference."""
    path = tmp_path / "config.yaml"
    path.write_text(config((2, 1, 1), **SETTINGS).to_yaml())
    good = run_jaxpar(["verify", str(path), "--json"])
    assert good.returncode == 0, good.stderr
    script = "from jaxpar import verify, cli; verify.TOLERANCE['float64'] = 0.0; cli.main()"
    bad = subprocess.run([sys.executable, "-c", script, "verify", str(path)], capture_output=True, text=True)
    assert bad.returncode == 1 and "differ" in bad.stdout, bad.stderr
