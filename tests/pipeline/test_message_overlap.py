"""Are pipeline messages hidden? Read from the program that XLA schedules for 8 H100s that are not here."""

import json
import subprocess
import sys

SCRIPT = """
import json
from jaxpar.config import Config
from jaxpar.inspect import compile_step
from jaxpar.inspect.summary import read_schedule

config = Config.from_dict({
    "model": {"architecture": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
              "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
              "attn_implementation": "xla"},
    "mesh": {"pipe": 4, "tensor": 2},
    "parallel": {"microbatches": 8, "remat": "full", "unroll": 2},
    "data": {"train": ["unused"], "sequence_length": 1024},
    "optimizer": {"name": "sgd", "learning_rate": 0.1, "schedule": "constant"},
    "train": {"steps": 1, "global_batch": 8, "run_dir": "unused"},
})
step = compile_step(config, "h100:8")
schedule = read_schedule(step.compiled, step.program.mesh)
print(json.dumps([
    (e.times, e.collective.buffer_bytes, e.hidden_share(schedule.roofline.device))
    for e in schedule.executions if e.collective.op == "collective-permute"
]))
"""


def test_steady_phase_hides_messages_in_both_directions():
    """Messages: 3 before the first backward (nothing to hide behind: the next tick waits), 2 × 8 steady, 3 after."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    messages = json.loads(done.stdout)
    message_bytes = 1 * 1024 * 4096 * 2  # one sequence in bfloat16, whole on each device of tensor
    assert [size for _, size, _ in messages] == [message_bytes] * 4
    steady = [hidden for times, _, hidden in messages if times == 8]
    assert len(steady) == 2 and min(steady) >= 0.9
