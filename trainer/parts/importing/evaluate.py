"""Makes our values of another project's, as the specifications of a table say.

A specification is the name of their key, a list of specifications, a number, or a table with:

- where the value comes from: `key` (the first of several that is set), `fact` (a specification of the table, by its
  name), `value` (itself), `call` (a function of rules.py, with the arguments `with`), or `read` (the same of a
  function that reads the configuration too);
- `chosen`: our key whose value wins if the user gives it;
- `type`: what it is read as; `omit`: values that count as none; `default`: what stands for none;
- `values`: ours by theirs; `otherwise`: ours of any other; without that any other is refused;
- `refused`: why a value is refused, by theirs; `refusal`: why any other is; `missing`: why none is; `instead`: what
  to do;
- `when`, `unless`: conditions, which are specifications; `equals` and `above` compare, else what is not 0 or empty
  holds.

Beside that, a row has `set`, a specification for each of our keys, and `check`, specifications that may refuse.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainer.parts.importing.configuration import TYPES, CannotMapError, Configuration, as_text
from trainer.parts.importing.rules import CALLED, READING
from trainer.parts.importing.table import Row

_UNKNOWN = "has a value without a counterpart; known are {known}"


def convert(row: Row, config: Configuration) -> Mapping[str, Any]:
    if not _applies(row.spec, config):
        return {}
    for spec in row.spec.get("check", ()):
        evaluate(spec, config)
    if "set" in row.spec:
        return {key: evaluate(spec, config) for key, spec in row.spec["set"].items()}
    value = evaluate(row.spec, config)
    return value if isinstance(value, Mapping) else {row.ours[0]: value}


def evaluate(spec: Any, config: Configuration) -> Any:
    if isinstance(spec, str):
        return config.get(spec)
    if isinstance(spec, list):
        return [evaluate(part, config) for part in spec]
    if not isinstance(spec, Mapping):
        return spec
    if spec.get("chosen") in config.chosen:
        return config.chosen[spec["chosen"]]
    try:
        return _mapped(spec, _read(spec, config), config) if _applies(spec, config) else None
    except CannotMapError as error:
        raise CannotMapError(error.why, error.instead or spec.get("instead", "")) from error


def _read(spec: Mapping[str, Any], config: Configuration) -> Any:
    value = _source(spec, config)
    if value is not None and "type" in spec:
        value = TYPES[spec["type"]](value)
    if value is not None and value not in spec.get("omit", ()):
        return value
    if "missing" in spec:
        raise CannotMapError(spec["missing"])
    return _constant(spec.get("default"), config)


def _source(spec: Mapping[str, Any], config: Configuration) -> Any:
    if "value" in spec:
        return spec["value"]
    if "fact" in spec:
        return evaluate(config.facts[spec["fact"]], config)
    if "call" in spec:
        return _call(CALLED[spec["call"]], spec, config)
    if "read" in spec:
        return _call(functools.partial(READING[spec["read"]], config), spec, config)
    return next((config.get(key) for key in _several(spec["key"]) if key in config), None)


def _call(function: Callable[..., Any], spec: Mapping[str, Any], config: Configuration) -> Any:
    """Return what a function makes of its arguments; one that has no default must be there."""
    arguments = {name: evaluate(part, config) for name, part in spec.get("with", {}).items()}
    set_ = {name: value for name, value in arguments.items() if value is not None}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is parameter.empty and name in arguments.keys() - set_.keys():
            raise CannotMapError("is not enough: a key that belongs to it is not set")
    return function(**set_)


def _mapped(spec: Mapping[str, Any], value: Any, config: Configuration) -> Any:
    for theirs, why in spec.get("refused", {}).items():
        if _plain(theirs) == _plain(value):
            raise CannotMapError(why)
    counterparts = spec.get("values")
    if value is None or counterparts is None:
        return value
    for theirs, ours in counterparts.items():
        if _plain(theirs) == _plain(value):
            return _constant(ours, config)
    if "otherwise" in spec:
        return _constant(spec["otherwise"], config)
    why = spec.get("refusal") or (as_text(value) and _UNKNOWN)
    raise CannotMapError(why.replace("{value}", str(value)).replace("{known}", ", ".join(counterparts)))


def _constant(value: Any, config: Configuration) -> Any:
    return evaluate(value, config) if isinstance(value, Mapping) else value


def _applies(spec: Mapping[str, Any], config: Configuration) -> bool:
    wanted, unwanted = _several(spec.get("when", ())), _several(spec.get("unless", ()))
    is_wanted = all(_holds(condition, config) for condition in wanted)
    return is_wanted and not any(_holds(condition, config) for condition in unwanted)


def _holds(condition: Mapping[str, Any], config: Configuration) -> bool:
    value = evaluate(condition, config)
    if value is None:
        return False
    if "equals" in condition:
        return _plain(value) in map(_plain, _several(condition["equals"]))
    return bool(value > condition["above"] if "above" in condition else value)


def _several(value: Any) -> Iterator[Any]:
    return iter(value if isinstance(value, list | tuple) else [value])


def _plain(value: Any) -> str:
    """Return a value as it is compared: true, True and "true" are the same."""
    return str(value).lower().replace("-", "_")
