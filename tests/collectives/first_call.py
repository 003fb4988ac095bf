"""Run in a process of its own: a train step's and an evaluation's first and second call, at a size people use.

Arguments: JSON of the sections mesh, parallel and grad_reduce of a config. Prints JSON: for each call the loss, the
gradient's norm, the norm of what each parameter was changed by, and the loss of an evaluation.
"""

import json
import sys

import jax
import numpy as np

from jaxpar.config import Config
from jaxpar.mesh import start
from jaxpar.step import build
from jaxpar.verify import random_batch

VALUES = {
    "model": {
        "architecture": "llama",
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
    "data": {"train": ["unused"], "sequence_length": 128},
    "optimizer": {"name": "sgd", "learning_rate": 1.0, "schedule": "constant"},
    "train": {"steps": 1, "global_batch": 16, "run_dir": "unused", "compute_dtype": "float32"},
}


def main() -> None:
    config, mesh = start(Config.from_dict(VALUES | json.loads(sys.argv[1])))
    program = build(config, mesh)
    batch = jax.device_put(random_batch(config), program.batch_sharding)
    first = jax.device_get(program.init())
    calls = []
    for _ in range(2):
        state = jax.device_put(first, jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state))
        jax.block_until_ready(state)
        sums = program.eval_step(state.params, batch)
        evaluated = float(sums["loss"]) / float(sums["tokens"])
        new, metrics = program.train_step(state, batch)
        changed = jax.tree.map(lambda a, b: float(np.linalg.norm(a - b)), jax.device_get(new.params), first.params)
        calls.append([float(metrics["loss"]), float(metrics["grad_norm"]), evaluated, *jax.tree.leaves(changed)])
    print(json.dumps(calls))


if __name__ == "__main__":
    main()
