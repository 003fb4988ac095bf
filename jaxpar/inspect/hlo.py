"""Reading the text of a compiled and scheduled XLA program.

`compiled.as_text()` lists computations; each is a list of instructions in the order in which they run:

    %name = f32[8,16]{1,0} all-reduce(%operand), replica_groups={{0,1},{2,3}}, to_apply=%add, ...

Only what the reports need is kept. Format: https://openxla.org/xla/operation_semantics and XLA's hlo_parser.cc.
"""

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Shape:
    """One array's element type, as XLA writes it, and dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return int(np.prod(self.dims, dtype=np.int64))

    @property
    def bytes(self) -> int:
        """Size without padding; the bits of an element are the first number in its type's name (`f8e4m3` has 8)."""
        bits = re.search(r"\d+", self.dtype)
        width = int(bits[0]) if bits else 8 if self.dtype == "pred" else 0
        return -(-self.elements * width // 8)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: unique in its computation.
        opcode: `fusion`, `all-reduce-start`, ...
        shapes: of the result; those of a tuple, nested ones flattened.
        operands: names of instructions of the same computation.
        literal: what stands between the parentheses.
        attributes: what comes after them.
        root: whether it is its computation's result.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str
    root: bool

    @property
    def output_bytes(self) -> int:
        """Of all results together."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def source(self) -> str:
        """The operation in the user's program that it comes from, as JAX names it; empty for what XLA adds."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def numbers(self, key: str) -> tuple[int, ...]:
        """The list of numbers of an attribute, as in `lhs_contracting_dims={1}` or `"key":["1"]`; empty without it."""
        found = re.search(rf'\b{key}"?[=:][{{\[]([^}}\]]*)[}}\]]', self.attributes)
        return tuple(int(n) for n in re.findall(r"\d+", found[1])) if found else ()

    def called(self, *keys: str) -> tuple[str, ...]:
        """Names of the computations that the attributes `keys` name."""
        found = (re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes) for key in keys)
        return tuple(name for match in found if match for name in re.findall(r"[\w.\-]+", match[1]))


@dataclass(frozen=True)
class Computation:
    """A named list of instructions in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that take each one as an operand."""
        users: dict[str, list[Instruction]] = {instruction.name: [] for instruction in self.instructions}
        for instruction in self.instructions:
            for operand in instruction.operands:
                users[operand].append(instruction)
        return users

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(instruction for instruction in self.instructions if instruction.root)

    def operand_shapes(self, instruction: Instruction) -> list[Shape]:
        """Shapes of everything that goes into an instruction of this computation."""
        return [shape for operand in instruction.operands for shape in self.by_name[operand].shapes]


@dataclass(frozen=True)
class Module:
    """A whole program."""

    computations: dict[str, Computation]
    entry: Computation

    def trip_count(self, loop: Instruction) -> int | None:
        """How often a `while` runs its body: what XLA notes, or the one constant its condition compares with."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        (condition,) = loop.called("condition")
        inside = [self.computations[condition]]
        for instruction in inside[0].instructions:
            inside += [self.computations[name] for name in instruction.called("calls")]
        constants = {i.literal for c in inside for i in c.instructions if i.opcode == "constant"}
        limits = [int(literal) for literal in constants if literal.isdigit()]
        return limits[0] if len(limits) == 1 else None


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_PARENTHESIS = re.compile(r"[()]")


def parse(text: str) -> Module:
    """Read what `compiled.as_text()` returns.

    Example:
        >>> module = parse('''
        ... ENTRY %main (x: f32[8]) -> f32[8] {
        ...   %x = f32[8]{0} parameter(0)
        ...   ROOT %y = f32[8]{0} negate(%x)
        ... }''')
        >>> module.entry.root.opcode, module.entry.root.output_bytes
        ('negate', 32)
    """
    computations: dict[str, Computation] = {}
    entry = header = None
    instructions: list[Instruction] = []
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            header, instructions = start, []
        elif header and line.startswith("}"):
            computations[header[2]] = Computation(header[2], tuple(instructions))
            entry = header[2] if header[1] else entry
            header = None
        elif header and (name := _INSTRUCTION.match(line)):
            instructions.append(_instruction(name, _COMMENT.sub("", line[name.end() :])))
    if entry is None:
        raise ValueError("this is not the text of a compiled program: it has no ENTRY computation")
    return Module(computations, computations[entry])


def _instruction(name: re.Match[str], rest: str) -> Instruction:
    """From `TYPE opcode(operands), attributes`."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opening = rest.index("(", end)
    closing = _closing(rest, opening)
    literal = rest[opening + 1 : closing]
    dims = lambda text: tuple(int(n) for n in re.findall(r"\d+", text))
    return Instruction(
        name=name[2],
        opcode=rest[end:opening].strip(),
        shapes=tuple(Shape(dtype, dims(text)) for dtype, text in _SHAPE.findall(rest[:end])),
        operands=tuple(re.findall(r"%([\w.\-]+)", literal)),
        literal=literal,
        attributes=rest[closing + 1 :],
        root=bool(name[1]),
    )


def _closing(text: str, opening: int) -> int:
    """Where the parenthesis that opens at `opening` closes."""
    depth = 0
    for found in _PARENTHESIS.finditer(text, opening):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"a parenthesis does not close in {text[opening : opening + 80]!r}")


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """The groups of devices among which a collective runs, from any of the forms that XLA writes.

    Args:
        attributes: of the instruction.
        devices: how many there are, which is what an empty list stands for.

    Example:
        >>> replica_groups("replica_groups={{0,1},{2,3}}", 4)
        [[0, 1], [2, 3]]
        >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
        [[0, 2], [1, 3]]
        >>> replica_groups("replica_groups=mesh['data'=2,'tensor'=2] {'data'}", 4)
        [[0, 2], [1, 3]]
    """
    if listed := re.search(r"replica_groups=(\{\{[\d,{}\s]*\}\}|\{\})", attributes):
        return _lists(listed[1]) or [list(range(devices))]
    if iota := re.search(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return _iota(iota[1]).tolist()
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?)\))? \{([^}]*)\}", attributes):
        return _mesh_groups(*mesh.groups())
    raise ValueError(f"replica groups are written in an unknown form: {attributes[:200]}")


def source_target_pairs(attributes: str) -> list[list[int]]:
    """The pairs of a collective-permute, as `[source, target]`."""
    found = re.search(r"source_target_pairs=(\{[\d,{}\s]*\})", attributes)
    return _lists(found[1]) if found else []


def _lists(text: str) -> list[list[int]]:
    return [[int(n) for n in inner.split(",")] for inner in re.findall(r"\{([\d,\s]+)\}", text)]


def _iota(text: str) -> np.ndarray:
    """`[2,4]<=[4,2]T(1,0)`: 0, 1, 2, … in the shape on the right, transposed, in the shape on the left."""
    shape, source, *order = ([int(n) for n in re.findall(r"\d+", part)] for part in re.split(r"<=|T", text))
    ids = np.arange(np.prod(source)).reshape(source)
    return (ids.transpose(order[0]) if order else ids).reshape(shape)


def _mesh_groups(axes: str, device_ids: str | None, over: str) -> list[list[int]]:
    """`['a'=4,'b'=2]` and `'a'`: along the named axes of that mesh, of the devices 0, 1, 2, … or `device_ids`.

    Part of an axis is written `'a':(2)4`: seen as three axes of sizes 2, 4 and the rest, the middle one.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    count = int(np.prod(list(sizes.values())))
    ids = _device_ids(device_ids, count) if device_ids else np.arange(count)
    parts = {name: (int(before), int(size)) for name, before, size in re.findall(r"'([^']*)':\((\d+)\)(\d+)", over)}
    split: list[tuple[int, bool]] = []
    for name, size in sizes.items():
        if name in parts:
            before, middle = parts[name]
            split += [(before, False), (middle, True), (size // (before * middle), False)]
        else:
            split.append((size, f"'{name}'" in over))
    order = sorted(range(len(split)), key=lambda dim: split[dim][1])
    group = int(np.prod([size for size, inside in split if inside]))
    return ids.reshape([size for size, _ in split]).transpose(order).reshape(-1, group).tolist()


def _device_ids(text: str, count: int) -> np.ndarray:
    """Of a mesh whose devices are not in order: a list, or `[4,2]T(1,0)` as in `_iota`."""
    if text.startswith("["):
        return _iota(f"[{count}]<={text}")
    return np.array([int(n) for n in text.split(",")])
