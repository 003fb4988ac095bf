"""ZeRO: what the replicas of `data` keep in parts, and how a part becomes whole for use (arXiv:1910.02054).

A stage is three trees of `PartitionSpec`: where parameters are stored, where gradients land, where the optimizer's
state lives. Every parameter has one dim that `data` may split: the largest that no other axis splits and that divides.

| stage | parameters | gradients | optimizer's state |
|---|---|---|---|
| 0 | whole | whole: summed by one all-reduce | whole |
| 1 | whole: gathered after the update | in parts: one reduce-scatter of a whole buffer | in parts |
| 2 | whole: gathered after the update | in parts; with one microbatch never whole | in parts |
| 3 | in parts: gathered layer by layer for use | in parts, never whole | in parts |

Bytes that one device sends in a step, for b bytes of gradients and n replicas: (n-1)/n times 2b in stages 0, 1 and 2
(with parameters as wide as gradients); in stage 3, for each microbatch, two gathers of the parameters in the compute
dtype and one scatter of gradients. What cannot be split stays as in stage 0, and is listed at the start of a run.

Stages 1 and 2 reduce once a step. A sum over several microbatches needs a whole buffer for that, so with more than one
they are the same program; only stage 3 then saves that memory, and pays for it with a scatter per microbatch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import all_gather, axis_size, psum, varying, varying_axes
from jaxpar.collectives.reduction import Reduction
from jaxpar.layers.layout import STACK
from jaxpar.mesh import DATA
from jaxpar.models.protocol import WHOLE, Use

Tree = Any
REPLICATED_SHARE = 0.02
"""Share of the parameters' bytes above which what stays whole is a warning."""


def split_dim(shape: Sequence[int], spec: P, replicas: int, *, stacked: bool) -> int | None:
    """The dim of a parameter that `data` splits: the largest free one that divides, the first of equals.

    Args:
        shape: of the whole array.
        spec: which axes split it already.
        replicas: size of `data`.
        stacked: dim 0 counts layers, which are used one at a time: it is not split.

    Returns:
        The dim, or None when there is no such dim.

    Example:
        >>> split_dim((6, 24, 40), P("pipe", None, "tensor"), 4, stacked=True)
        1
        >>> split_dim((24, 40), P(), 4, stacked=False), split_dim((7,), P(), 4, stacked=False)
        (1, None)
    """
    axes = [*spec, *[None] * (len(shape) - len(spec))]
    free = [d for d in range(int(stacked), len(shape)) if axes[d] is None and shape[d] % replicas == 0]
    return max(free, key=lambda d: shape[d]) if replicas > 1 and free else None


@dataclass(frozen=True)
class Zero:
    """The three trees of a stage.

    Attributes:
        stage: 0 to 3.
        dims: for each parameter the dim that `data` splits, or None.
        whole: specs without `data`.
        split: the same with `data` on the chosen dims.
    """

    stage: int
    dims: Tree
    whole: Tree
    split: Tree

    @classmethod
    def of(cls, stage: int, shapes: Tree, specs: Tree, replicas: int) -> "Zero":
        """Choose the dims.

        Args:
            stage: 0 to 3.
            shapes: the parameters, as arrays or shapes.
            specs: their specs over the other axes.
            replicas: size of `data`.
        """
        dims = jax.tree_util.tree_map_with_path(
            lambda path, p, spec: split_dim(p.shape, spec, replicas, stacked=_stacked(path)), shapes, specs
        )
        split = jax.tree.map(lambda p, spec, dim: _with_data(spec, dim, p.ndim), shapes, specs, dims)
        return cls(stage, dims, specs, split)

    @property
    def stored(self) -> Tree:
        """Specs of the parameters between steps."""
        return self.split if self.stage == 3 else self.whole

    @property
    def landed(self) -> Tree:
        """Specs of the gradients that the optimizer gets, and of its state."""
        return self.split if self.stage >= 1 else self.whole

    def replicated(self, shapes: Tree) -> dict[str, int]:
        """The parameters that no dim of which can be split: dotted name and bytes of the whole array."""
        leaves, dims = jax.tree_util.tree_leaves_with_path(shapes), _dims_list(self.dims, shapes)
        return {
            ".".join(str(key.key) for key in path): math.prod(p.shape) * p.dtype.itemsize
            for (path, p), dim in zip(leaves, dims, strict=True)
            if dim is None
        }


@dataclass(frozen=True)
class Replicas:
    """In block view: how the replicas of `data` get parameters ready for use and bring their gradients together.

    Attributes:
        zero: what is split.
        reduction: how gradients are summed.
        compute_dtype: parameters are used in it.
    """

    zero: Zero
    reduction: Reduction
    compute_dtype: Any

    @property
    def gathers(self) -> bool:
        """Whether parameters are stored in parts and gathered for use."""
        return self.zero.stage == 3

    @property
    def use(self) -> Use:
        """How the model gets what `ready` gave."""
        return Use(self._layer, self._rest, DATA) if self.gathers else WHOLE

    def ready(self, params: Tree) -> Tree:
        """Parameters to differentiate: cast, and varying over `data`, so that each replica's gradients stay its own.

        Parts of parameters stay as they are stored; `use` makes them whole.
        """

        def ready(p: jax.Array, dim: int | None) -> jax.Array:
            return p if self.gathers and dim is not None else varying(p.astype(self.compute_dtype), DATA)

        return jax.tree.map(ready, params, self.zero.dims)

    def _layer(self, params: Tree) -> Tree:
        return self._whole(params, self._layer_dims(params))

    def _rest(self, params: Tree) -> Tree:
        return {name: self._whole(tree, self.zero.dims[name]) for name, tree in params.items()}

    def _layer_dims(self, params: Tree) -> Tree:
        """The dims of one layer's parameters."""
        return jax.tree.map(lambda p, dim: None if dim is None else dim - 1, params, self.zero.dims[STACK])

    def _whole(self, params: Tree, dims: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(params)
        at = _dims_list(dims, params)
        parts = [i for i, dim in enumerate(at) if dim is not None]
        for i, whole in zip(parts, self._gather([leaves[i] for i in parts], [at[i] for i in parts]), strict=True):
            leaves[i] = whole
        return jax.tree.unflatten(structure, leaves)

    def _gather(self, parts: list[jax.Array], dims: list[Any]) -> list[jax.Array]:
        """Gather over `data` (sends (n-1)/n of the whole); gradients come back scattered, in float32 or wider."""

        @jax.custom_vjp
        def gather(parts: list[jax.Array]) -> list[jax.Array]:
            return [all_gather(p.astype(self.compute_dtype), DATA, d) for p, d in zip(parts, dims, strict=True)]

        def backward(dtypes: None, grads: list[jax.Array]) -> tuple[list[jax.Array]]:
            scattered = self.reduction.scatter([widened(g) for g in grads], dims)
            return ([g.astype(p.dtype) for g, p in zip(scattered, parts, strict=True)],)

        gather.defvjp(lambda parts: (gather(parts), None), backward)
        return gather(parts)

    def land(self, sums: Tree, grads: Tree) -> tuple[Tree, Tree]:
        """Sum over the replicas: numbers, and gradients to where the stage wants them, once a step.

        Args:
            sums: over this replica's tokens, as of the loss.
            grads: of what `ready` gave, float32 or wider; those of parts are summed already.
        """
        leaves, structure = jax.tree.flatten(grads)
        dims = _dims_list(self.zero.dims, grads)
        waiting = [i for i, dim in enumerate(dims) if dim is None or not self.gathers]
        summed = self.reduce([leaves[i] for i in waiting], [dims[i] for i in waiting])
        for i, g in zip(waiting, summed, strict=True):
            leaves[i] = g
        return psum(sums, DATA), jax.tree.unflatten(structure, leaves)

    def reduce(self, grads: Tree, dims: Tree) -> Tree:
        """Sum gradients over the replicas: whole in stage 0, else each replica's part."""
        return self.reduction.scatter(grads, dims) if self.zero.stage else self.reduction.sum(grads)

    # ---------------------------------------------------------------- layer by layer, inside the backward pass

    def landing(self, params: Tree) -> Tree:
        """Zeros of the kind that gradients land in. Differentiating with respect to them gives the summed gradients."""

        def zeros(p: jax.Array, dim: int | None) -> jax.Array:
            split = dim is not None and self.zero.stage > 0
            shape = [size // axis_size(DATA) if split and d == dim else size for d, size in enumerate(p.shape)]
            axes = varying_axes(p) | ({DATA} if split else set())
            return varying(jnp.zeros(shape, jnp.promote_types(p.dtype, jnp.float32)), tuple(axes))

        return jax.tree.map(zeros, params, self.zero.dims)

    @property
    def landing_use(self) -> Use:
        """`use` for what `landing_params` gives."""
        return Use(lambda entry: self._landing(entry, self._layer_dims(entry[0])), lambda rest: rest)

    def landing_params(self, ready: Tree, total: Tree | None, landing: Tree) -> Tree:
        """Parameters whose gradients, added to `total`, are summed over the replicas as the backward pass has them.

        The sums become the gradients of `landing`. Outside the stack that happens once for each entry, wherever the
        model uses it; each layer of the stack is an entry of its own, which `landing_use` takes.

        Args:
            ready: what `ready` gave.
            total: gradients of earlier microbatches, if there were any.
            landing: what `landing` gave.
        """
        entry = lambda name: (ready[name], total and total[name], landing[name])
        rest = {name: self._landing(entry(name), self.zero.dims[name]) for name in ready if name != STACK}
        return rest | {STACK: entry(STACK)}

    def _landing(self, entry: tuple[Tree, Tree, Tree], dims: Tree) -> Tree:
        @jax.custom_vjp
        def use(params: Tree, total: Tree, landing: Tree) -> Tree:
            return params

        def backward(total: Tree, grads: Tree) -> tuple[None, None, Tree]:
            grads = jax.tree.map(widened, grads)
            return None, None, self.reduce(grads if total is None else jax.tree.map(jnp.add, total, grads), dims)

        use.defvjp(lambda params, total, landing: (params, total), backward)
        return use(*entry)


def widened(g: jax.Array) -> jax.Array:
    """In float32, or what is wider."""
    return g.astype(jnp.promote_types(g.dtype, jnp.float32))


def _stacked(path: Any) -> bool:
    return path[0].key == STACK


def _with_data(spec: P, dim: int | None, ndim: int) -> P:
    if dim is None:
        return spec
    axes = [*spec, *[None] * (ndim - len(spec))]
    axes[dim] = DATA
    return P(*axes)


def _dims_list(dims: Tree, like: Tree) -> list[int | None]:
    """The dims as a list in the order of the leaves of a tree (None is no leaf of its own to JAX)."""
    return jax.tree.structure(like).flatten_up_to(dims)
