"""Eight virtual CPU devices and float64 for all tests, those in the docstrings of `jaxpar` included."""

import os

# Before JAX is imported, and for the commands that tests start: the test extra brings JAX's CUDA plugin, to compile
# for GPUs that are not there, and it complains loudly when it looks for one.
os.environ["JAX_PLATFORMS"] = "cpu"

# XLA aborts the process when a virtual device waits 40 seconds for the others, as happens on a machine that is busy.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_collective_call_terminate_timeout_seconds=600"

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
