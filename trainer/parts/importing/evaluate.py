"""Makes our values of another project's, as the specifications of a table say.

A specification is the name of their key, a list of specifications, a number, or a table with:

- where the value comes from: `key` (the first of several that is set), `fact` (a specification of the table, by its
  name), `value` (itself), `call` (a function of rules.py, with the arguments `with`), or `read` (the same of a
  function that reads the configuration too);
- `chosen`: our key whose value wins if the user gives it;
- `type`: what it is read as; `omit`: values that count as none; `default`: what stands for none;
- `values`: ours by theirs; `otherwise`: ours of any other; without that any other is refused;
- `refused`: why a value is refused, by theirs; `refusal`: why any other is; `missing`: why none is; `instead`: what to
  do;
- `when`, `unless`: conditions, which are specifications; `equals` and `above` compare, else what is not 0 or empty
  holds.

Beside that, a row has `set`, a specification for each of our keys, and `check`, specifications that may refuse.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainer.parts.importing.given import TYPES, CannotMapError, Given, as_text
from trainer.parts.importing.rules import CALLED, READING
from trainer.parts.importing.table import Row

_UNKNOWN = "has a value without a counterpart; known are {known}"


def convert(row: Row, given: Given) -> Mapping[str, Any]:
    """Return what a row sets, by our keys.

    Raises:
        CannotMapError: A value has no counterpart.
    """
    if not _applies(row.spec, given):
        return {}
    for spec in row.spec.get("check", ()):
        evaluate(spec, given)
    if "set" in row.spec:
        return {key: evaluate(spec, given) for key, spec in row.spec["set"].items()}
    value = evaluate(row.spec, given)
    return value if isinstance(value, Mapping) else {row.ours[0]: value}


def evaluate(spec: Any, given: Given) -> Any:
    """Return the value of a specification, None where there is none.

    Raises:
        CannotMapError: It has no counterpart.
    """
    if isinstance(spec, str):
        return given.get(spec)
    if isinstance(spec, list):
        return [evaluate(part, given) for part in spec]
    if not isinstance(spec, Mapping):
        return spec
    if spec.get("chosen") in given.chosen:
        return given.chosen[spec["chosen"]]
    try:
        return _mapped(spec, _read(spec, given), given) if _applies(spec, given) else None
    except CannotMapError as error:
        raise CannotMapError(error.why, error.instead or spec.get("instead", "")) from error


def _read(spec: Mapping[str, Any], given: Given) -> Any:
    """Return the value before it is mapped."""
    value = _source(spec, given)
    if value is not None and "type" in spec:
        value = TYPES[spec["type"]](value)
    if value is not None and value not in spec.get("omit", ()):
        return value
    if "missing" in spec:
        raise CannotMapError(spec["missing"])
    return _constant(spec.get("default"), given)


def _source(spec: Mapping[str, Any], given: Given) -> Any:
    if "value" in spec:
        return spec["value"]
    if "fact" in spec:
        return evaluate(given.facts[spec["fact"]], given)
    if "call" in spec:
        return _call(CALLED[spec["call"]], spec, given)
    if "read" in spec:
        return _call(functools.partial(READING[spec["read"]], given), spec, given)
    return next((given.get(key) for key in _several(spec["key"]) if key in given), None)


def _call(function: Callable[..., Any], spec: Mapping[str, Any], given: Given) -> Any:
    """Return what a function makes of its arguments; one that has no default must be there."""
    arguments = {name: evaluate(part, given) for name, part in spec.get("with", {}).items()}
    there = {name: value for name, value in arguments.items() if value is not None}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is parameter.empty and name in arguments.keys() - there.keys():
            raise CannotMapError("is not enough: a key that belongs to it is not set")
    return function(**there)


def _mapped(spec: Mapping[str, Any], value: Any, given: Given) -> Any:
    for theirs, why in spec.get("refused", {}).items():
        if _plain(theirs) == _plain(value):
            raise CannotMapError(why)
    known = spec.get("values")
    if value is None or known is None:
        return value
    for theirs, ours in known.items():
        if _plain(theirs) == _plain(value):
            return _constant(ours, given)
    if "otherwise" in spec:
        return _constant(spec["otherwise"], given)
    why = spec.get("refusal") or (as_text(value) and _UNKNOWN)
    raise CannotMapError(why.replace("{value}", str(value)).replace("{known}", ", ".join(known)))


def _constant(value: Any, given: Given) -> Any:
    """Return a value that stands for itself unless it is a specification."""
    return evaluate(value, given) if isinstance(value, Mapping) else value


def _applies(spec: Mapping[str, Any], given: Given) -> bool:
    wanted, unwanted = _several(spec.get("when", ())), _several(spec.get("unless", ()))
    return all(_holds(one, given) for one in wanted) and not any(_holds(one, given) for one in unwanted)


def _holds(condition: Mapping[str, Any], given: Given) -> bool:
    value = evaluate(condition, given)
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
