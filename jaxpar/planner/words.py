"""Numbers and layouts in words, for people."""

from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.price import MemoryParts, TimeParts
from jaxpar.quantities import seconds

TIME = {
    "compute": "compute",
    "data": "exposed communication over data",
    "pipe": "exposed communication over pipe",
    "tensor": "exposed communication over tensor",
    "bubble": "bubble",
    "optimizer": "optimizer",
}
"""The parts of a time."""
MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "temporaries": "temporaries",
    "batch": "batch",
}
"""The parts of memory."""


def gigabytes(size: float) -> str:
    """Bytes in GB (10⁹), little ones in MB.

    Example:
        >>> gigabytes(412.4e9), gigabytes(80.69e9), gigabytes(3.14e9), gigabytes(3e5)
        ('412 GB', '80.7 GB', '3.1 GB', '0.3 MB')
    """
    if size < 50e6:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e9:,.0f} GB" if size >= 99.95e9 else f"{size / 1e9:.1f} GB"


def mesh(layout: Layout) -> str:
    """The axes with their sizes.

    Example:
        >>> mesh(Layout(8, 1, 4))
        'data 8 × pipe 1 × tensor 4'
    """
    return f"data {layout.data} × pipe {layout.pipe} × tensor {layout.tensor}"


def rest(layout: Layout, workload: Workload) -> str:
    """What is chosen besides the mesh; what is as simple as it can be is left out.

    Example:
        >>> rest(Layout(8, 2, 4, zero=1, chunks=2, microbatches=8, remat="full"), Workload(4096, 64))
        'ZeRO 1, 1f1b in 2 chunks, 8 microbatches of 1 sequence, remat full'
    """
    size = workload.sequences_per_microbatch(layout)
    said = [f"ZeRO {layout.zero}"] if layout.zero else []
    if layout.pipe > 1:
        said += [layout.schedule + (f" in {layout.chunks} chunks" if layout.chunks > 1 else "")]
    pieces = "1 microbatch" if layout.microbatches == 1 else f"{layout.microbatches} microbatches"
    said += [f"{pieces} of {size} sequence{'' if size == 1 else 's'}"]
    said += [f"remat {layout.remat}"] if layout.remat != "none" else []
    said += ["sequence parallel"] if layout.sequence_parallel else []
    said += [f"{layout.algorithm} reduction"] if layout.algorithm != "native" else []
    return ", ".join(said)


def in_words(layout: Layout, workload: Workload) -> str:
    """All of a layout."""
    return f"{mesh(layout)}, {rest(layout, workload)}"


def longer(time: TimeParts, best: TimeParts) -> str:
    """How much longer a step takes than the best, and which part grows most.

    Example:
        >>> longer(TimeParts(1, 0, 0, 0.69, 0, 0), TimeParts(1, 0, 0, 0.5, 0, 0))
        'a step takes 12.7% longer: exposed communication over tensor 500 ms → 690 ms (+38%)'
    """
    if time.total == best.total:
        return "as fast, and not as simple"
    part = max(TIME, key=lambda name: getattr(time, name) - getattr(best, name))
    before, after = getattr(best, part), getattr(time, part)
    growth = f" ({after / before - 1:+.0%})" if 0 < after < 10 * before else ""
    share = time.total / best.total - 1
    percent = f"{share:.1%}" if share >= 0.0005 else "less than 0.1%"
    return f"a step takes {percent} longer: {TIME[part]} {seconds(before)} → {seconds(after)}{growth}"


def too_much(memory: MemoryParts, usable_bytes: float) -> str:
    """How much memory against how much, and what takes most of it.

    Example:
        >>> too_much(MemoryParts(100e9, 12e9, 300e9, 0, 0, 0), 80.7e9)
        '412 GB against 80.7 GB, 300 GB of it optimizer state'
    """
    part = max(MEMORY, key=lambda name: getattr(memory, name))
    held = f"{gigabytes(getattr(memory, part))} of it {MEMORY[part]}"
    return f"{gigabytes(memory.total)} against {gigabytes(usable_bytes)}, {held}"
