"""The base of hooks for servers that hold adapters side by side. Each version is an adapter with its own name.

An adapter's name contains its digest, so a rollout that names `policy-2.120.0f1e2d3c4b5a6978` runs that version to
its end, and nothing is paused. The newest adapter is what the engine runs; older ones are unloaded once no request
uses them.
"""

import contextlib
import os
import re
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from explorer_hooks.hook import EXAM_LABEL, HookOptions, Running
from explorer_hooks.hooks.adapters import BaseCheck, require_adapter
from explorer_hooks.hooks.http_engine import require_files
from explorer_hooks.hooks.http_settings import ServerHook
from explorer_hooks.hooks.settings import HookSettings
from explorer_hooks.proof.start_model import StartModel, start_model_of
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError
from syncd.protocol.version import Pair
from syncd.transports.base import WeightDirectory, WeightTensors

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LABEL = re.compile(r"(\d{1,16})\.(\d{1,16})\.[0-9a-f]{16}", re.ASCII)
"""The part of an adapter's name behind the dash."""


class AdapterServerHook(ServerHook):
    """One server that serves adapters.

    Further settings: `name`: the prefix of adapters' names; `keep`: how many adapters stay loaded besides the newest;
    `drain`: seconds after which an adapter counts as unused if the engine does not say what it uses; `base`: the
    directory on this host of the model that the server was started with, if the server names another one.
    """

    kinds: ClassVar[frozenset[str]] = frozenset({"lora"})

    product: ClassVar[str]
    """The engine's name in messages."""
    log: ClassVar[str]
    """The hint if it refuses an adapter."""

    def __init__(self, options: HookOptions) -> None:
        super().__init__(options)
        self._base = BaseCheck(self._base_directory)
        self._starts: dict[str, StartModel | None] = {}
        self._loading: str | None = None
        self._superseded: dict[str, float] = {}

    def _configure(self, settings: HookSettings) -> None:
        self._prefix = settings.text("name", "policy")
        if not _NAME.fullmatch(self._prefix):
            problem = f"name={self._prefix} cannot begin an adapter's name"
            raise ConfigError(problem, hint="letters, digits, dot, dash, underscore")
        self._keep, self._drain = settings.count("keep", 2), settings.seconds("drain", 600.0)
        self._named_base = settings.text("base", "")

    @abstractmethod
    def _require_loadable(self, target: WeightDirectory, config: Mapping[str, Any]) -> None:
        """Return if the server can load adapters at run time, and this one; `config` is its adapter_config.json."""

    @abstractmethod
    def _post_load(self, name: str, path: str) -> None:
        """Have the server load the adapter of a directory of its own host."""

    @abstractmethod
    def _unload(self, name: str) -> None:
        """Have the server take an adapter's name away; a running request keeps the adapter until it ends."""

    @abstractmethod
    def _used(self) -> frozenset[str] | None:
        """Return the adapters that requests use or wait for, None if the engine does not say."""

    @abstractmethod
    def _started_from(self) -> str:
        """Return the model that the server was started with as the server names it, empty if it does not."""

    def adapter_kind(self, target: WeightDirectory | WeightTensors | None) -> str:
        if not isinstance(target, WeightDirectory):
            return "no adapter"
        config = require_adapter(target)
        layers = config.get("target_modules")
        shown = sorted(map(str, layers)) if isinstance(layers, list) else layers
        return f"adapter of rank {config.get('r')} for {shown}"

    def adapter_name(self, target: WeightDirectory) -> str:
        return self.name_of(target.label)

    def name_of(self, label: str) -> str:
        """Return the name under which requests use the version of a label."""
        return f"{self._prefix}-{label}"

    def prepare(self, target: WeightDirectory) -> None:
        require_files(self, target)
        config = require_adapter(target)
        self._listed()
        self._base.require(target)
        self._require_loadable(target, config)

    def load(self, target: WeightDirectory) -> None:
        name, path = self.adapter_name(target), self._paths.there(target.path)
        listed = self._listed()
        if listed.get(name) == path:
            return
        self._loading = name
        if name in listed:
            self._unload(name)
        self._post_load(name, path)

    def commit(self, target: WeightDirectory) -> None:
        """Check that the engine lists the adapter; older ones stay until it is proven."""
        name = self.adapter_name(target)
        listed = self._versions()
        if name not in listed:
            problem = f"{self.product} loaded {name} and does not list it"
            raise LoadFailedError(problem, path=self._server.address, hint=self.log)
        self._withdraw(listed, target)
        self._loading = None

    def settle(self, target: WeightDirectory) -> None:
        """Unload adapters before this one that are no longer used."""
        with contextlib.suppress(EngineUnreachableError):
            self._retire(self._versions(), target.version.pair)

    def current_version(self) -> Running:
        """Return the newest adapter that the engine lists. Nothing is ever paused."""
        listed = self._versions()
        newest = max(listed, key=lambda name: (listed[name], name), default=None)
        return Running(None if newest is None else newest.removeprefix(f"{self._prefix}-"))

    def abort(self, last_good: WeightDirectory | None) -> None:
        """Unload the failed adapter; the last good one was not touched, and is loaded again only if it is missing."""
        if last_good is not None:
            listed = self._versions()
            if self.adapter_name(last_good) not in listed:
                with self._restoring(last_good.label, f"restart the {self.product} server"):
                    self.load(last_good)
            self._withdraw(listed, last_good)
        elif self._loading is not None and self._loading in self._versions():
            self._unload(self._loading)
        self._loading = None

    def start_directory(self) -> str:
        return self._base_directory()

    def end_exam(self) -> bool:
        """Unload the adapter of an exam; the model and other adapters were not touched."""
        self._loading = None
        if (name := self.name_of(EXAM_LABEL)) in self._listed():
            self._unload(name)
        return False

    def _withdraw(self, listed: dict[str, Pair], target: WeightDirectory) -> None:
        """Unload versions after the one that is to run, and others of its number."""
        pair, own = target.version.pair, self.adapter_name(target)
        for name in [name for name, other in listed.items() if other >= pair and name != own]:
            self._unload(name)

    def _retire(self, listed: dict[str, Pair], pair: Pair) -> None:
        """Unload old versions that no request uses, except the newest `keep`."""
        older = sorted((name for name in listed if listed[name] < pair), key=lambda name: listed[name])
        now = time.monotonic()
        self._superseded = {name: self._superseded.get(name, now) for name in older}
        surplus = older[: max(0, len(older) - self._keep)]
        if not surplus:
            return
        used = self._used()
        # The next version tries again: an old adapter too many does no harm to the new one.
        for name in surplus:
            idle = now - self._superseded[name] >= self._drain if used is None else name not in used
            if idle:
                with contextlib.suppress(LoadFailedError):
                    self._unload(name)

    def _versions(self) -> dict[str, Pair]:
        versions: dict[str, Pair] = {}
        for name in self._listed():
            prefix, dash, label = name.rpartition("-")
            version = _LABEL.fullmatch(label)
            if prefix == self._prefix and dash and version is not None:
                versions[name] = int(version[1]), int(version[2])
        return versions

    def _listed(self) -> dict[str, str]:
        return {str(model.get("id")): str(model.get("root")) for model in self._models()}

    def _models(self) -> list[dict[str, Any]]:
        """Return what the server says of its models and adapters; an adapter has a parent."""
        models = self._server.get_json("/v1/models").get("data")
        if not isinstance(models, list):
            problem = f"/v1/models is not answered as {self.product} does"
            raise EngineUnreachableError(problem, path=self._server.address)
        return [model for model in models if isinstance(model, dict)]

    def _base_name(self) -> str:
        """Return the directory on this host, or the name, of the model that the server was started with."""
        return self._named_base or self._paths.here(self._started_from())

    def _start_model(self) -> StartModel | None:
        name = self._base_name()
        if name not in self._starts:
            self._starts[name] = start_model_of(name) if name else None
        return self._starts[name]

    def _base_directory(self) -> str:
        """Return the directory of the model that the server was started with, empty if it cannot be read here."""
        name = self._base_name()
        return name if os.path.isdir(name) else ""
