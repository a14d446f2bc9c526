"""The settings of a hook, `--hook-option KEY=VALUE`: each is checked, and a misspelt one is refused."""

from collections.abc import Mapping

from syncd.errors import ConfigError

_FLAGS = {"true": True, "false": False}


class Settings:
    """Reads each setting once and refuses those that nobody asked for.

    Args:
        hook: The hook's name, for messages.
        given: Values by name.
    """

    def __init__(self, hook: str, given: Mapping[str, str]) -> None:
        self._hook = hook
        self._given = dict(given)
        self._known: list[str] = []

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        self._known.append(key)
        return self._given.get(key, default)

    def choice(self, key: str, default: str, among: tuple[str, ...]) -> str:
        """Return one of a few words.

        Raises:
            ConfigError: It is another.
        """
        value = self.text(key, default)
        if value not in among:
            raise self._wrong(key, value, f"one of {', '.join(among)}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false.

        Raises:
            ConfigError: It is neither.
        """
        value = self.text(key, "true" if default else "false")
        if value not in _FLAGS:
            raise self._wrong(key, value, "true or false")
        return _FLAGS[value]

    def seconds(self, key: str, default: float) -> float:
        """Return a number of seconds above 0.

        Raises:
            ConfigError: It is none.
        """
        value = self.text(key, str(default))
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise self._wrong(key, value, "a number of seconds above 0")
        return seconds

    def count(self, key: str, default: int) -> int:
        """Return a whole number from 0.

        Raises:
            ConfigError: It is none.
        """
        value = self.text(key, str(default))
        if not (value.isascii() and value.isdigit()):
            raise self._wrong(key, value, "a whole number")
        return int(value)

    def done(self) -> None:
        """Check that every setting was read.

        Raises:
            ConfigError: One is not known.
        """
        if unknown := sorted(set(self._given) - set(self._known)):
            raise ConfigError(
                f"the hook {self._hook} has no setting {', '.join(unknown)}",
                hint=f"it has {', '.join(sorted(self._known))}",
            )

    def _wrong(self, key: str, value: str, wanted: str) -> ConfigError:
        return ConfigError(f"{key}={value} of the hook {self._hook}", hint=f"{key} is {wanted}")
