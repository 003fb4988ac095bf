"""Eight virtual CPU devices and float64 for all tests, those in the docstrings of `jaxpar` included."""

import os

# Before JAX is imported, and for the commands that tests start: the test extra brings JAX's CUDA plugin, to compile
# for GPUs that are not there, and it complains loudly when it looks for one.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from jaxpar.mesh import use_cpu_devices

use_cpu_devices(8)
jax.config.update("jax_enable_x64", True)
