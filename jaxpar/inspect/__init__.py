"""What a compiled program does: memory, collectives by mesh axis, and how much of them is hidden.

For a function of one's own: `report(compiled, mesh)`. For a config's train step, on devices that need not be here:
`compile_step(config, "h100:8").report`. `jaxpar compile` prints the same.
"""

from jaxpar.inspect.compiling import CompiledStep, compile_step
from jaxpar.inspect.summary import Report, report

__all__ = ["CompiledStep", "Report", "compile_step", "report"]
