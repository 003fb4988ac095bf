"""How a layer says where its parameters live, and how that is read.

A parameter is an `nnx.Param` with the metadata `layout`: a `PartitionSpec` for one layer's array. Without it a
parameter is replicated. Two more keys handle attention heads, which may not be cut: `heads`, how many equal
heads the split dim holds, and `replicate_heads`, true where an axis larger than the number of heads is met by
replication (key and value heads) and not by an error. A fourth is `padding`: so many rows at the end of the first
dim are zeros that only fill the array up, so that it can be split.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config import InputError
from jaxpar.mesh import PIPE

Initializer = Callable[..., jax.Array]
STACK = "blocks"
"""Everything below this name in a model has a leading layer dim (see `jaxpar.models.stack`), split over `pipe`."""


def specs(module: nnx.Module, mesh: Mesh) -> dict[str, Any]:
    """The `PartitionSpec` of every parameter of a module on a mesh, as a nested dict of names.

    Args:
        module: any NNX module, with arrays or abstract (`nnx.eval_shape`).
        mesh: the mesh; axes of a layout that it does not have, or has with size 1, are dropped.

    Returns:
        A tree with the structure of `nnx.to_pure_dict(nnx.state(module, nnx.Param))`.

    Raises:
        InputError: when a dim, or its heads, cannot be split evenly; names the parameter and the equation.

    Example:
        >>> from jaxpar.layers import ColumnParallelLinear
        >>> from jaxpar.mesh import make_mesh
        >>> specs(ColumnParallelLinear(4, 6, bias=True, rngs=nnx.Rngs(0)), make_mesh(tensor=2))
        {'bias': P('tensor',), 'weight': P(None, 'tensor')}
    """
    state = nnx.state(module, nnx.Param)
    tree = {path: _spec(path, param, mesh.shape) for path, param in nnx.to_flat_state(state)}
    return nnx.traversals.unflatten_mapping(dict(sorted(tree.items())))


def shardings(module: nnx.Module, mesh: Mesh) -> dict[str, Any]:
    """`specs` as `NamedSharding`s, for `jax.device_put`, `jit` and checkpoints."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(module, mesh))


def padding(module: nnx.Module) -> dict[str, int]:
    """The rows of padding at the end of parameters, by name, of those that have some.

    Args:
        module: any NNX module, with arrays or abstract (`nnx.eval_shape`).

    Example:
        >>> from jaxpar.layers import VocabParallelEmbedding
        >>> padding(VocabParallelEmbedding(503, 8, rngs=nnx.Rngs(0)))
        {'weight': 9}
    """
    params = nnx.to_flat_state(nnx.state(module, nnx.Param))
    rows = {"/".join(map(str, path)): param.get_metadata().get("padding", 0) for path, param in params}
    return {name: count for name, count in rows.items() if count}


def _spec(path: tuple[Any, ...], param: nnx.Variable, sizes: Mapping[str, int]) -> P:
    metadata = param.get_metadata()
    layout = metadata["layout"] if "layout" in metadata else P()
    stage = PIPE if PIPE in sizes and sizes[PIPE] > 1 else None
    stacked = (stage,) if path[0] == STACK else ()
    dims = [_dim_spec(path, param.shape[len(stacked) + i], axes, metadata, sizes) for i, axes in enumerate(layout)]
    spec = P(*stacked, *dims)
    return spec if any(spec) else P()


def _dim_spec(path: tuple[Any, ...], dim: int, axes: Any, metadata: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """One entry of a spec: the axes that this mesh really has, unless the heads are to be replicated over them."""
    names = tuple(a for a in ((axes,) if isinstance(axes, str) else axes or ()) if a in sizes and sizes[a] > 1)
    ways = 1
    for name in names:
        ways *= sizes[name]
    heads = metadata.get("heads", dim)
    if heads % ways == 0:
        return names[0] if len(names) == 1 else names or None
    if "replicate_heads" in metadata and ways % heads == 0:
        return None
    unit = "heads" if "heads" in metadata else "size"
    rule = "must divide one another" if "replicate_heads" in metadata else "must be a multiple of the devices"
    raise InputError(
        f"parameter {'.'.join(map(str, path))}: {unit} {heads} over {' × '.join(names)} = {ways} devices leaves "
        f"{heads} mod {ways} = {heads % ways}; they {rule}"
    )
