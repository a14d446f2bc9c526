"""command: a program of the user loads the version."""

import contextlib
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from explorer_hooks.hook import HookOptions, Running
from explorer_hooks.hooks.phases import PhaseHook
from explorer_hooks.hooks.process import CommandEnd, run
from explorer_hooks.hooks.settings import HookSettings
from syncd.errors import (
    ConfigError,
    CorruptDataError,
    EngineUnreachableError,
    LoadFailedError,
    RefusedError,
    StorageError,
    plain,
    storage_errors,
)
from syncd.protocol.disk import MISSING
from syncd.protocol.documents import decode, encode
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.version import UNKNOWN_LABEL
from syncd.transports.base import WeightDirectory

PHASES = ("prepare", "load", "commit")
"""The phases that the program can be run for, besides `abort`, with the version to restore."""

_NOT_NOW = frozenset({69, 75})
"""Exit codes of a program whose engine does not answer (EX_UNAVAILABLE, EX_TEMPFAIL)."""

_PLACEHOLDER = re.compile(r"\{(\{[a-z_]+\})\}|\{([a-z_]+)\}")
_KNOWN = ("path", "step", "generation", "label", "digest", "kind", "phase")
_SHOWN = 600
_HINT = "--hook command -- ./load.sh '{path}' '{label}'"


class CommandHook(PhaseHook):
    """Runs a program for each version, without a shell.

    Args:
        argv: Program and arguments. `{path}`, `{step}`, `{generation}`, `{label}`, `{digest}`, `{kind}` and `{phase}`
            are replaced by the version's, `{{path}}` by the literal `{path}`.
        current: A second program that prints what the engine runs: its label, followed by `paused` if it is.
        state: A file that stores the last committed version, if there is no such program.
        phases: Which of `PHASES` the program is run for.
        timeout: Seconds that one run may take.
    """

    name: ClassVar[str] = "command"

    def __init__(
        self,
        argv: Sequence[str],
        *,
        current: Sequence[str] = (),
        state: str | None = None,
        phases: Sequence[str] = ("load",),
        timeout: float = 300.0,
    ) -> None:
        _check(argv)
        _check(phases, among=PHASES)
        self._argv, self._current, self._timeout = tuple(argv), tuple(current), timeout
        self._phases = frozenset(phases)
        super().__init__()
        self._file = state
        self._label = _read_label(state)

    @classmethod
    def from_options(cls, options: HookOptions) -> Self:
        """Return a hook for the command behind `--`, or the address, split as a shell splits words.

        Settings: `current`, a command; `state`, a file; `phases`, with commas between them.
        """
        settings = HookSettings(cls.name, options.settings)
        current, state = _words(settings.text("current", "")), settings.text("state", "")
        phases = tuple(filter(None, settings.text("phases", "load").split(",")))
        settings.done()
        argv = options.argv or _words(options.address or "")
        for program in (argv[:1], current[:1]):
            if program and shutil.which(program[0]) is None:
                raise ConfigError(f"there is no program {program[0]}", hint=_HINT)
        return cls(argv, current=current, state=state or None, phases=phases, timeout=options.timeout)

    def current_version(self) -> Running:
        if not self._current:
            return Running(self._label)
        finished = run(self._current, {"SYNCD_PHASE": "current"}, self._timeout)
        if finished.code != 0:
            raise EngineUnreachableError(f"{self._current[0]} {ending(finished, self._timeout)}")
        return running_of(finished.out)

    def prepare(self, target: WeightDirectory) -> None:
        """Have the program check it; then forget in the file what runs: a follower that dies loads a version."""
        super().prepare(target)
        self._store(UNKNOWN_LABEL)  # not in `load`, where a full disk would be a failed load

    def _do(self, phase: str, target: WeightDirectory) -> None:
        values = values_of(target, phase)
        argv = arguments(self._argv, values)
        if phase != "abort" and phase not in self._phases:
            return
        finished = run(
            argv, {f"SYNCD_{name.upper()}": value for name, value in values.items()}, self._timeout
        )
        if finished.code == 0:
            _show(finished)
            return
        message = f"{self._argv[0]} for {phase} of {target.label} {ending(finished, self._timeout)}"
        if finished.code in _NOT_NOW or (finished.code is None and phase == "prepare"):
            raise EngineUnreachableError(message)
        raise (RefusedError if phase == "prepare" else LoadFailedError)(message)

    def _keep(self, label: str | None) -> None:
        super()._keep(label)
        with contextlib.suppress(StorageError):  # then the next follower loads a version
            self._store(label)

    def _store(self, label: str | None) -> None:
        if self._file is None:
            return
        with storage_errors(self._file):
            LocalDisk().replace(self._file, encode({"label": label}))


def _show(finished: CommandEnd) -> None:
    for text, stream in ((finished.out, sys.stdout), (finished.err, sys.stderr)):
        with contextlib.suppress(OSError):  # a full disk of the log fails no load
            for line in text.splitlines():
                print(plain(line), file=stream, flush=True)


def _read_label(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        label = decode(LocalDisk().read(path), path).document.get("label")
    except MISSING:
        return None
    except CorruptDataError:
        return UNKNOWN_LABEL
    return label if isinstance(label, str) else UNKNOWN_LABEL


def values_of(target: WeightDirectory, phase: str) -> dict[str, str]:
    """Return the values of the placeholders, which are those of the environment too."""
    version = target.version
    items = (target.path, version.step, version.generation, target.label, version.digest, version.kind, phase)
    return dict(zip(_KNOWN, map(str, items), strict=True))


def filled(word: str, values: Mapping[str, str]) -> str:
    """Return one argument with its placeholders replaced; placeholders in a value are kept as text."""
    return _PLACEHOLDER.sub(lambda match: match[1] or values[match[2]], word)


def arguments(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    made = [filled(word, values) for word in words]
    for word, argument in zip(words, made, strict=True):
        if argument.startswith("-") and not word.startswith("-"):
            raise RefusedError(f"{argument[:80]!r} would be an option of the program, in the place of {word}")
    return made


def running_of(out: str) -> Running:
    """Return what the program `current` printed: nothing, `LABEL` or `LABEL paused`."""
    words = out.split()
    paused = words[-1:] == ["paused"]
    words = words[:-1] if paused else words
    return Running(words[0] if words and words[0] != "-" else None, paused)


def ending(finished: CommandEnd, timeout: float) -> str:
    """Return how a command ended and the end of its output, on one line that is safe to print."""
    how = f"ended with {finished.code}" if finished.code is not None else f"was killed after {timeout:g} s"
    if finished.code is not None and finished.code < 0:
        how = f"was killed by signal {-finished.code}"
    said = " ".join((finished.err.strip() or finished.out.strip()).split())
    if not said:
        return how
    shown = "".join(character if character.isprintable() else "?" for character in said[-_SHOWN:])
    return f"{how}: {'...' if len(said) > _SHOWN else ''}{shown}"


def _check(words: Sequence[str], among: Sequence[str] | None = None) -> None:
    if not words:
        raise ConfigError("the command hook needs a command and a phase to run it for", hint=_HINT)
    if among is not None and (unknown := sorted(set(words) - set(among))):
        raise ConfigError(f"there is no phase {unknown[0]}", hint=f"known: {', '.join(among)}")
    for match in () if among else _PLACEHOLDER.finditer(" ".join(words)):
        if match[2] and match[2] not in _KNOWN:
            placeholders = ", ".join(_KNOWN)
            raise ConfigError(
                f"there is no placeholder {match[0]}",
                hint=f"known: {placeholders}; {{{match[0]}}} is literal",
            )


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"not a command: {text!r}: {error}") from None
