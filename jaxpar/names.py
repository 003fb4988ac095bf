"""A state's leaves by name: the path to each, as in "params/blocks/mlp/up/weight". Checkpoints and servers use it."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

Named = dict[str, Any]
"""Arrays or shapes by the name of their path."""


def named(tree: Any) -> Named:
    """Flatten to names: field names and keys on the way to each leaf, joined by "/".

    Example:
        >>> named({"norm": {"scale": 1.0}, "layers": [2.0]}).keys()
        dict_keys(['layers/0', 'norm/scale'])
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = {"/".join(jax.tree_util.keystr((key,), simple=True) for key in path): leaf for path, leaf in leaves}
    assert len(names) == len(leaves), "two leaves of the state have the same name"
    return {name: leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for name, leaf in names.items()}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict of which these are the leaves.

    Example:
        >>> nested({"norm/scale": 1.0, "norm/bias": 2.0})
        {'norm': {'scale': 1.0, 'bias': 2.0}}
    """
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def like(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """A tree of the same structure with the leaves of these names."""
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[name] for name in named(tree)])
