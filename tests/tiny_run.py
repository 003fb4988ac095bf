"""A run that takes a moment: its text, its config file, and what it writes."""

import json
import random
from pathlib import Path
from typing import Any

CONFIG = """
model: {{architecture: llama, vocab_size: 257, vocab_multiple: 8, hidden_size: 16, intermediate_size: 48,
        num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, resid_pdrop: 0.1}}
mesh: {{data: 2, tensor: 2}}
parallel: {{microbatches: 2}}
data: {{train: [{folder}/text.txt], validation: 0.1, sequence_length: 16}}
optimizer: {{learning_rate: 2e-2, decay_steps: 20, clip_norm: 1.0, weight_decay: 0.1}}
train: {{steps: 8, global_batch: 8, run_dir: {folder}/run, compute_dtype: float32, eval_every: 4, eval_batches: 2}}
checkpoint: {{every: 3}}
"""
WORDS = ["the", "a", "cat", "rat", "dog", "sat", "ran", "on", "under", "mat", "and", "then", "saw", "old", "red"]


def write_tiny(folder: Path, name: str = "tiny.yaml") -> Path:
    """Write the text and the config file; `folder/run` is the run's folder."""
    choose = random.Random(0).choice
    (folder / "text.txt").write_text(" ".join(choose(WORDS) for _ in range(1500)))
    (folder / name).write_text(CONFIG.format(folder=folder))
    return folder / name


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def quick_compiles_env(compile_cache: Path) -> dict[str, str]:
    """The environment of a process on CPU devices that keeps and finds compiled programs in a folder.

    XLA is told not to optimise: it halves the time to compile, and what a program means stays the same.
    """
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compile_cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
