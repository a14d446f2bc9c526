"""LoRA adapters in vLLM: each version is an adapter with a name of its own, and nothing is paused.

An adapter's name says its content, so a rollout that names `policy-2.120.0f1e2d3c4b5a6978` runs that version to its
end. The newest adapter is what the engine runs; older ones are unloaded once no request uses them.
"""

import contextlib
import os
import re
import time
from typing import ClassVar, Self

from explorer_hooks.hook import Hook, HookOptions, Running
from explorer_hooks.hooks.adapters import in_use
from explorer_hooks.hooks.http_engine import PathMap, document_of, refuse_unfit, server_settings
from explorer_hooks.hooks.settings import Settings
from explorer_hooks.http_client import Server
from syncd.errors import ConfigError, EngineDeadError, EngineUnreachableError, LoadFailedError, RefusedError
from syncd.protocol.version import Pair
from syncd.transports.base import WeightDirectory

ADDRESS = "http://127.0.0.1:8000"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_MISSING = (
    "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, on 127.0.0.1"
)
_LOG = "see the log of the vLLM server; --max-lora-rank must be at least the adapter's rank"
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LABEL = re.compile(r"(\d{1,16})\.(\d{1,16})(?:\.[0-9a-f]{16})?", re.ASCII)
"""What stands behind the dash of an adapter's name; earlier releases wrote the pair alone."""

_GONE = 404


class LoraHook(Hook):
    """One vLLM server that serves adapters.

    Args:
        server: Where it listens.
        paths: How its paths differ from those of this host.
        prefix: What adapters' names begin with.
        keep: How many adapters stay loaded besides the newest.
        drain: Seconds after which an adapter counts as unused where the engine does not say what it uses.
    """

    name = "lora"
    kinds: ClassVar[frozenset[str]] = frozenset({"lora"})

    def __init__(self, server: Server, paths: PathMap, *, prefix: str, keep: int, drain: float) -> None:
        self._server = server
        self._paths = paths
        self._prefix = prefix
        self._keep = keep
        self._drain = drain
        self._loading: str | None = None
        self._superseded: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._server.address})"

    @classmethod
    def from_options(cls, options: HookOptions) -> Self:
        """Return a hook for the server at the address, `http://127.0.0.1:8000` without one."""
        settings = Settings(cls.name, options.settings)
        server, paths = server_settings(settings, options, ADDRESS, _MISSING)
        prefix = settings.text("name", "policy")
        if not _NAME.fullmatch(prefix):
            raise ConfigError(
                f"name={prefix} cannot begin an adapter's name", hint="letters, digits, dot, dash, underscore"
            )
        keep, drain = settings.count("keep", 2), settings.seconds("drain", 600.0)
        settings.done()
        return cls(server, paths, prefix=prefix, keep=keep, drain=drain)

    def adapter_name(self, target: WeightDirectory) -> str:
        """Return the name under which requests use a version: it is the `model` of an OpenAI-compatible request."""
        return f"{self._prefix}-{target.label}"

    def prepare(self, target: WeightDirectory) -> None:
        """Check that the adapter is whole and that the engine loads adapters at run time."""
        refuse_unfit(self, target)
        _refuse_incomplete(target)
        self._listed()
        self._check_enabled()

    def load(self, target: WeightDirectory) -> None:
        """Load the adapter under its own name; what is served under other names goes on."""
        name, path = self.adapter_name(target), self._paths.there(target.path)
        listed = self._listed()
        if listed.get(name) == path:
            return
        self._loading = name
        if name in listed:
            self._unload(name)
        self._server.tell(_LOAD, {"lora_name": name, "lora_path": path}, hint=_LOG)

    def commit(self, target: WeightDirectory) -> None:
        """Check that the engine lists the adapter, and unload those that are used no more."""
        name = self.adapter_name(target)
        listed = self._versions()
        if name not in listed:
            raise LoadFailedError(
                f"vLLM loaded {name} and does not list it", path=self._server.address, hint=_LOG
            )
        self._withdraw(listed, target)
        self._retire(listed, target.version.pair)
        self._loading = None

    def current_version(self) -> Running:
        """Ask which adapters are loaded: the newest is what runs. Nothing is ever paused."""
        listed = self._versions()
        newest = max(listed, key=lambda name: (listed[name], name), default=None)
        return Running(None if newest is None else newest.removeprefix(f"{self._prefix}-"))

    def abort(self, last_good: WeightDirectory | None) -> None:
        """Unload what failed; the last good adapter was never touched, and is loaded again only if it is gone."""
        if last_good is None:
            self._drop_failed()
            return
        listed = self._versions()
        if self.adapter_name(last_good) not in listed:
            self._load_again(last_good)
        self._withdraw(listed, last_good)
        self._loading = None

    def _drop_failed(self) -> None:
        if self._loading is not None and self._loading in self._versions():
            self._unload(self._loading)
        self._loading = None

    def _load_again(self, last_good: WeightDirectory) -> None:
        try:
            self.load(last_good)
        except LoadFailedError as error:
            raise EngineDeadError(
                f"the engine cannot go back to {last_good.label}: {error.message}",
                path=self._server.address,
                hint="restart the vLLM server",
            ) from error

    def _withdraw(self, listed: dict[str, Pair], target: WeightDirectory) -> None:
        """Unload versions after the one that is to run, and others of its number: they are of no use any more.

        A running request keeps its adapter in the engine until it ends; new ones can no longer name it.
        """
        pair, own = target.version.pair, self.adapter_name(target)
        for name in [name for name, other in listed.items() if other >= pair and name != own]:
            self._unload(name)

    def _retire(self, listed: dict[str, Pair], pair: Pair) -> None:
        """Unload old versions that no request uses, except the newest few of them."""
        older = sorted((name for name in listed if listed[name] < pair), key=lambda name: listed[name])
        now = time.monotonic()
        self._superseded = {name: self._superseded.get(name, now) for name in older}
        surplus = older[: max(0, len(older) - self._keep)]
        if not surplus:
            return
        used = in_use(self._server)
        for name in surplus:
            idle = now - self._superseded[name] >= self._drain if used is None else name not in used
            if idle:
                # Left for the next commit: an old adapter too many does not make the new one bad.
                with contextlib.suppress(LoadFailedError):
                    self._unload(name)

    def _unload(self, name: str) -> None:
        reply = self._server.tried(_UNLOAD, {"lora_name": name})
        if reply.is_error and reply.status != _GONE:
            raise LoadFailedError(self._server.complaint(reply), path=self._server.address, hint=_LOG)

    def _check_enabled(self) -> None:
        """Send a request that names no adapter: it is refused where adapters can be loaded, and unknown elsewhere."""
        self._server.tried(_LOAD, {"lora_name": "", "lora_path": ""})

    def _versions(self) -> dict[str, Pair]:
        """Return the adapters that this hook names, those of earlier releases too, by name."""
        found: dict[str, Pair] = {}
        for name in self._listed():
            prefix, dash, label = name.rpartition("-")
            version = _LABEL.fullmatch(label)
            if prefix == self._prefix and dash and version is not None:
                found[name] = int(version[1]), int(version[2])
        return found

    def _listed(self) -> dict[str, str]:
        """Return the path of each model and adapter by name."""
        models = self._server.ask_json("/v1/models").get("data")
        if not isinstance(models, list):
            raise EngineUnreachableError("/v1/models is not answered as vLLM does", path=self._server.address)
        return {str(one.get("id")): str(one.get("root")) for one in models if isinstance(one, dict)}


def _refuse_incomplete(target: WeightDirectory) -> None:
    """Check that an adapter has its two files, the weights as the manifest has them.

    Raises:
        RefusedError: One is missing, or the configuration is none of LoRA.
    """
    if target.shards and WEIGHTS not in {shard.name for shard in target.shards}:
        raise RefusedError(
            f"the manifest of version {target.label} has no {WEIGHTS}", path=target.path, hint="syncd ls"
        )
    if not os.path.isfile(f"{target.path}/{WEIGHTS}"):
        raise RefusedError(f"{WEIGHTS} is not there", path=target.path, hint="syncd verify --deep")
    config = f"{target.path}/{CONFIG}"
    if document_of(config).get("peft_type") != "LORA":
        raise RefusedError("peft_type is not LORA", path=config, hint="save the adapter with peft")
