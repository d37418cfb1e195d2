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
    """YAML without underscores in fractions: `0.5_2` is a band of ratios, which YAML 1.1 takes for 0.52."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        first: [(tag, pattern) for tag, pattern in known if tag not in NUMBERS]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


for _tag, _pattern in NUMBERS.items():
    ConfigLoader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list("-+0123456789."))
