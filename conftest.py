"""Eight virtual CPU devices and float64 for all tests, those in the docstrings of `jaxpar` included."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
