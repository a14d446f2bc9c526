"""YAML as other trainers read it: safe, with `1e-6` as a number, and with duplicate keys as errors."""

import re
from typing import Any

import yaml

_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_LEFT_AS_TEXT = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")


class YamlError(ValueError):
    """Text is not YAML, or not YAML that says one thing."""


class SourceLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the number format of OmegaConf, and without duplicate keys and dates."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - PyYAML's signature
        seen = set[str]()
        for key, _ in node.value:
            name = str(key.value)
            if key.id != "scalar":
                raise YamlError(f"line {key.start_mark.line + 1}: a key is not text")
            if name in seen:
                raise YamlError(f"line {key.start_mark.line + 1}: the key {name!r} is given twice")
            seen.add(name)
        return super().construct_mapping(node, deep=deep)


SourceLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _LEFT_AS_TEXT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
SourceLoader.add_implicit_resolver(_LEFT_AS_TEXT[0], _FLOAT, list("-+0123456789."))


def read_yaml(text: str) -> Any:
    try:
        return yaml.load(text, SourceLoader)  # noqa: S506 - it is a safe loader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise YamlError(f"{where}{getattr(error, 'problem', None) or 'not YAML'}") from error
    except RecursionError as error:
        raise YamlError("it is nested too deeply") from error
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, YamlError) else YamlError(str(error)) from error


def read_scalar(text: str) -> Any:
    """Return a value of a command line as Hydra reads it: a number, true, null, a list; else text."""
    try:
        return read_yaml(text)
    except YamlError:
        return text
