"""Reading and writing YAML with the scalars of YAML 1.2, and the two readings a person would add.

PyYAML follows YAML 1.1, where `6e-4` is a string, `no` is false, `010` is 8 and `1:30` is 90. Here:

* `true`, `false`: booleans; `yes`, `no`, `on`, `off`: strings.
* `null`, `~` and nothing at all: None.
* `12`, `1_000`, `0o17`, `0x1F`: integers; `6e-4`, `6E-4`, `.5`, `1_000.5`, `.inf`: floats.
* Everything else that is plain is a string: `007` and `1:30` too, since they are read in more than one way.

A key that stands twice in a mapping is refused. Follows https://yaml.org/spec/1.2.2/#103-core-schema, except
that `_` may stand between digits and that numbers with leading zeros are strings.
"""

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError

_DIGITS = r"(?:0|[1-9](?:_?[0-9])*)"
_FRACTION = r"[0-9](?:_?[0-9])*"
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (rf"[-+]?(?:{_DIGITS}|0o[0-7]+|0x[0-9a-fA-F]+)", list("-+0123456789")),
    "float": (
        rf"[-+]?(?:{_DIGITS}(?:\.(?:{_FRACTION})?)?(?:[eE][-+]?[0-9]+)?|\.{_FRACTION}(?:[eE][-+]?[0-9]+)?)"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars above; refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConstructorError(None, None, f"the key {key_node.value!r} is not a word", key_node.start_mark)
            if key in seen:
                raise ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=True)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes whatever either version of YAML would not read back as the same string."""


_Loader.yaml_implicit_resolvers = {}  # none of YAML 1.1's
for _tag, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node), 0)


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


def load(text: str) -> Any:
    """The value that `text` stands for.

    Args:
        text: one YAML document, or one scalar or flow value such as `6e-4` or `[a, b]`.

    Returns:
        Plain dicts with string keys, lists, strings, numbers, booleans and None.

    Raises:
        yaml.YAMLError: on a syntax error, a tag that is not plain YAML, or a key that stands twice or is no string.

    Example:
        >>> load("{rate: 6e-4, steps: 1_000, name: no, warm: true, time: 1:30}")
        {'rate': 0.0006, 'steps': 1000, 'name': 'no', 'warm': True, 'time': '1:30'}
    """
    return yaml.load(text, Loader=_Loader)


def dump(value: Any) -> str:
    """Text that `load` turns back into `value`, keys in their order.

    Example:
        >>> print(dump({"path": "1e5", "rate": 0.0006, "axes": {"data": -1}}), end="")
        path: '1e5'
        rate: 0.0006
        axes:
          data: -1
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False)
