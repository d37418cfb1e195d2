"""YAML as configurations are written."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(?:0x[0-9a-fA-F]+|0o?[0-7]+|[1-9][0-9]{0,2}(?:_[0-9]{3})+|[1-9][0-9]*|0)",
    "tag:yaml.org,2002:float": r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|"
    r"\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
}


class ConfigLoader(yaml.SafeLoader):
    """YAML without underscores in fractions: `0.5_2` is a band of ratios, which YAML 1.1 takes for 0.52.

    A key that stands twice in a mapping is an error: one of the two values would silently be lost.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        first: [(tag, pattern) for tag, pattern in known if tag not in NUMBERS]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1  # type: ignore[no-untyped-call]
            # `<<` takes over what another mapping has, and may be given several times.
            if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key, str):
                continue
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} stands on line {seen[key]} already", problem_mark=key_node.start_mark
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


for _tag, _pattern in NUMBERS.items():
    ConfigLoader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list("-+0123456789."))
