"""Parameter and operation counts against numbers that other programs and papers state."""

import subprocess
import sys
from typing import Any

import pytest

from jaxpar.config import ModelConfig
from jaxpar.flops import flops_per_token, mfu, parameter_count, peak_flops_per_second


def model(architecture: str, **sizes: Any) -> ModelConfig:
    return ModelConfig.model_validate({"architecture": architecture, **sizes})


TINY = dict(vocab_size=503, hidden_size=64, num_attention_heads=8, num_key_value_heads=2)

# Counted by transformers and torch on models of these configs (the fixtures' reference.json, transformers 5.24).
TRANSFORMERS = [
    (model("llama", **TINY, head_dim=8, intermediate_size=176, num_hidden_layers=3), 196_928),
    (model("qwen2", **TINY, intermediate_size=176, num_hidden_layers=2, tie_word_embeddings=True), 120_768),
    (
        model(
            "gpt2",
            vocab_size=503,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=128,
        ),
        190_464,
    ),
]

# Published totals of released models (model cards; OpenAI's 124M is exactly this many).
RELEASED = [
    (
        model(
            "gpt2",
            vocab_size=50257,
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            max_position_embeddings=1024,
        ),
        124_439_808,
    ),
    (
        model(
            "llama",
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        ),
        8_030_261_248,
    ),
    (
        model(
            "mistral",
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            sliding_window=4096,
        ),
        7_241_732_096,
    ),
    (
        model(
            "qwen2",
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
        494_032_768,
    ),
    (
        model(
            "qwen3",
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
        ),
        596_049_920,
    ),
]


@pytest.mark.parametrize(("config", "count"), TRANSFORMERS + RELEASED)
def test_parameter_count(config: ModelConfig, count: int):
    assert parameter_count(config) == count


def test_optional_biases():
    plain = dict(vocab_size=10, hidden_size=4, intermediate_size=7, num_hidden_layers=3, num_attention_heads=2)
    bare = parameter_count(model("llama", **plain))
    assert parameter_count(model("llama", **plain, attention_bias=True)) - bare == 3 * (4 + 4 + 4 + 4)
    assert parameter_count(model("llama", **plain, mlp_bias=True)) - bare == 3 * (7 + 7 + 4)


def test_flops_follow_palm():
    """PaLM's own numbers for its MFU: 540B has L=118, H=48, Q=256, T=2048 (arXiv:2204.02311, table 1, appendix B)."""
    config = model(
        "llama",
        vocab_size=256000,
        hidden_size=18432,
        intermediate_size=4 * 18432,
        num_hidden_layers=118,
        num_attention_heads=48,
        head_dim=256,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    attention = flops_per_token(config, 2048) - flops_per_token(config, 0)
    assert attention == 12 * 118 * 48 * 256 * 2048
    norms = 18432 * (2 * 118 + 1)
    assert flops_per_token(config, 0) == 6 * (parameter_count(config) - norms)


def test_flops_leave_out_the_lookup_and_know_windows():
    sizes = dict(vocab_size=11, hidden_size=6, intermediate_size=10, num_hidden_layers=2, num_attention_heads=3)
    tied, untied = (model("llama", **sizes, tie_word_embeddings=tie) for tie in (True, False))
    assert flops_per_token(tied, 16) == flops_per_token(untied, 16)
    windowed = model("mistral", **sizes, sliding_window=5)
    assert flops_per_token(windowed, 16) == flops_per_token(windowed, 5) == flops_per_token(untied, 5)
    assert flops_per_token(windowed, 4) == flops_per_token(untied, 4)


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100-PCIE-40GB", "float32", 156e12),  # NVIDIA A100 datasheet: TF32 156
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", None),
        ("NVIDIA H100 NVL", "bfloat16", None),
        ("NVIDIA H200", "float16", 989e12),
        ("NVIDIA H200 NVL", "bfloat16", None),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA GB200", "bfloat16", 2500e12),
        ("NVIDIA GB300", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3", "float64", None),
        ("cpu", "float32", None),
    ],
)
def test_peaks(kind: str, dtype: str, peak: float | None):
    assert peak_flops_per_second(kind, dtype) == peak


def test_mfu():
    """PaLM 540B: 238.3K tokens/s on 6144 TPU v4 (275 TFLOP/s) are 46.2% (arXiv:2204.02311, table 3 and appendix B)."""
    flops = 6 * 540_350_000_000 + 12 * 118 * 48 * 256 * 2048
    share = mfu(238.3e3, flops, devices=6144, peak=275e12)
    assert share == pytest.approx(0.462, abs=1e-3)
    assert mfu(238.3e3, flops, devices=6144, peak=None) is None


def test_imports_no_jax():
    code = "import sys, jaxpar.flops; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
