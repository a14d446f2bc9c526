"""Which adapters vLLM uses, from its metrics.

`vllm:lora_requests_info` has one line for each set of adapters that was ever in use at once; its value is the time
at which this was last so, so the line with the highest value is the newest. It is written after each step of the
engine: an adapter whose last request has just ended may still be named, never the other way round.
"""

import re

from explorer_hooks.http_client import Server
from syncd.errors import ConfigError, EngineUnreachableError

_METRIC = "vllm:lora_requests_info"
_LINE = re.compile(rf"^{_METRIC}{{(?P<labels>[^}}]*)}}\s+(?P<value>\S+)", re.MULTILINE)
_LABEL = re.compile(r'(?P<name>\w+)="(?P<value>[^"]*)"')
_ADAPTERS = frozenset({"running_lora_adapters", "waiting_lora_adapters"})


def in_use(server: Server) -> frozenset[str] | None:
    """Return the adapters that requests use or wait for, None where the engine does not say."""
    try:
        return adapters_in(server.ask("/metrics").body.decode("utf-8", "replace"))
    except (ConfigError, EngineUnreachableError):
        return None


def adapters_in(metrics: str) -> frozenset[str] | None:
    """Return the adapters in use by metrics in the text format, None where they do not tell."""
    if _METRIC not in metrics:
        return None
    newest = max(_LINE.finditer(metrics), key=lambda line: _number(line["value"]), default=None)
    if newest is None:
        return frozenset()
    names = [one["value"] for one in _LABEL.finditer(newest["labels"]) if one["name"] in _ADAPTERS]
    return frozenset(name for text in names for name in text.split(",") if name)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
