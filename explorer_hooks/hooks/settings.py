"""The settings of a hook, as `--hook-option KEY=VALUE` gives them."""

import re
from collections.abc import Callable, Mapping

from syncd.errors import ConfigError

_FLAGS = ("true", "false")


class HookSettings:
    """The settings of a hook, `--hook-option KEY=VALUE`: each value is checked, and an unknown key is refused."""

    def __init__(self, hook: str, settings: Mapping[str, str]) -> None:
        self._hook = hook
        self._settings = dict(settings)
        self._read_keys: list[str] = []

    def text(self, key: str, default: str) -> str:
        self._read_keys.append(key)
        return self._settings.get(key, default)

    def choice(self, key: str, default: str, among: tuple[str, ...]) -> str:
        return self._checked(key, default, f"one of {', '.join(among)}", lambda value: value in among)

    def flag(self, key: str, *, default: bool) -> bool:
        return self._checked(key, str(default).lower(), "true or false", _FLAGS.__contains__) == "true"

    def seconds(self, key: str, default: float) -> float:
        return float(self._checked(key, str(default), "a number of seconds above 0", _is_positive))

    def count(self, key: str, default: int) -> int:
        is_count = re.compile("[0-9]+").fullmatch
        return int(self._checked(key, str(default), "a whole number", is_count))

    def done(self) -> None:
        if unknown := sorted(set(self._settings) - set(self._read_keys)):
            raise ConfigError(
                f"the hook {self._hook} has no setting {', '.join(unknown)}",
                hint=f"it has {', '.join(sorted(self._read_keys))}",
            )

    def _checked(self, key: str, default: str, wanted: str, is_good: Callable[[str], object]) -> str:
        value = self.text(key, default)
        if not is_good(value):
            raise ConfigError(f"{key}={value} of the hook {self._hook}", hint=f"{key} is {wanted}")
        return value


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False
