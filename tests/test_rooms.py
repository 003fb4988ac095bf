"""The order of the rooms: a module imports only what stands in its own row or before it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import jaxpar

PACKAGE = Path(jaxpar.__file__).parent

ROWS = [
    ["config"],
    ["arguments", "hardware", "flops", "quantities", "collective_costs"],
    ["mesh"],
    ["traced"],
    ["collectives"],
    ["layers"],
    ["models"],
    ["losses"],
    ["pipeline"],
    ["zero"],
    ["optimizer"],
    ["wide_sums", "gradients"],
    ["step"],
    ["data"],
    ["names", "orbax_log", "disk_errors", "checkpoint", "hf"],
    ["metrics", "console"],
    ["inspect"],
    ["verify", "drift"],
    ["planner"],
    ["run_folder", "start_report"],
    ["parameter_server"],
    ["trainer", "launch"],
    ["bench"],
    ["cli"],
]
"""The rooms from the ground up; those in one row may import each other."""
ROW = {name: number for number, row in enumerate(ROWS) for name in row}
WITHOUT_JAX = [
    "config",
    "arguments.py",
    "hardware.py",
    "flops.py",
    "quantities.py",
    "collective_costs",
    "bench/__init__.py",
    "bench/commands.py",
    "cli",
    "planner",
    *(f"pipeline/{name}.py" for name in ("__init__", "schedules", "orders", "check", "simulate", "partition")),
    *(f"pipeline/{name}.py" for name in ("draw", "report")),
]
"""Rooms and files that import no JAX, nor anything that does."""
JAX_AND_ITS_USERS = {"jax", "jaxlib", "flax", "optax", "orbax", "grain"}


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE), ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, tree: ast.AST) -> Iterator[str]:
    """The dotted names that the statements below `tree` import, relative ones made absolute."""
    package = ["jaxpar", *path.parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def room(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def upward(path: Path, tree: ast.AST) -> list[str]:
    """The imports of rooms in rows after the module's own."""
    reached = [name.split(".")[1] for name in imports(path, tree) if name.startswith("jaxpar.")]
    return [name for name in reached if name in ROW and ROW[name] > ROW[room(path)]]


def top_level_imports(path: Path, tree: ast.Module) -> set[str]:
    """The packages whose import runs when the module is imported."""
    inside = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in tree.body if not isinstance(node, inside)]
    return {name.split(".")[0] for node in nodes for name in imports(path, node)}


def test_every_module_has_a_room():
    assert {room(path) for path, _ in modules()} - {"__init__"} <= set(ROW)


def test_imports_point_down():
    found = {str(path): up for path, tree in modules() if room(path) in ROW and (up := upward(path, tree))}
    assert found == {}


def test_an_upward_import_is_found():
    path = Path("layers/linear.py")
    assert upward(path, ast.parse("from jaxpar import models, mesh")) == ["models"]
    assert upward(path, ast.parse("def f():\n    import jaxpar.step")) == ["step"]
    assert upward(path, ast.parse("from ..trainer import train")) == ["trainer"]
    assert upward(path, ast.parse("from . import linear\nfrom jaxpar.layers.norm import RMSNorm")) == []


def test_rooms_without_jax():
    listed = {path: tree for path, tree in modules() if room(path) in WITHOUT_JAX or str(path) in WITHOUT_JAX}
    assert Path("config/root.py") in listed and Path("cli.py") in listed
    found = {
        str(path): names
        for path, tree in listed.items()
        if (names := top_level_imports(path, tree) & JAX_AND_ITS_USERS)
    }
    assert found == {}
    # What they import of ours must be without JAX as well.
    for path, tree in listed.items():
        ours = [
            name
            for node in tree.body
            if not isinstance(node, ast.FunctionDef)
            for name in imports(path, node)
            if name.startswith("jaxpar.")
        ]
        assert [name for name in ours if not is_without_jax(name)] == [], path


def is_without_jax(name: str) -> bool:
    """Whether the module of a dotted name is listed, itself or its room."""
    _, top, *rest = name.split(".")
    return bool({top, f"{top}.py", "/".join([top, *rest[:1]]) + ".py"} & set(WITHOUT_JAX))


def test_an_import_of_a_room_with_jax_is_found():
    assert is_without_jax("jaxpar.pipeline.schedules.Schedule") and is_without_jax("jaxpar.flops.mfu")
    assert not is_without_jax("jaxpar.pipeline.executor.Executor") and not is_without_jax("jaxpar.mesh.PIPE")
