"""Where the page may listen, and by which names it may be asked for: pure functions, no name is ever looked up.

A web page of a stranger can point a name of its own at 127.0.0.1 and so read what listens there (DNS rebinding). Its
requests carry that name in `Host`: what is neither an address nor a name known here is refused.
"""

import ipaddress
import re
from collections.abc import Collection

from syncd.errors import UsageError

LOCALHOST = "localhost"

_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::[0-9]{1,5})?", re.ASCII | re.IGNORECASE)


def address_of(host: str) -> str:
    """Return the address to listen at.

    Raises:
        UsageError: It is neither an address nor `localhost`.
    """
    if host.lower() == LOCALHOST:
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        hint = "127.0.0.1, ::1, or with --expose 0.0.0.0 or an address that `ip -brief address` shows"
        raise UsageError(f"{host!r} is no address to listen at", hint=hint) from None


def is_loopback(address: str) -> bool:
    """Return whether only this host reaches an address."""
    found = ipaddress.ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def may_ask(header: str | None, *, loopback: bool, names: Collection[str]) -> bool:
    """Return whether a request with this `Host` is answered.

    Args:
        header: The header as it came, None without one.
        loopback: The page listens at an address that only this host reaches.
        names: Names, lower case, by which it may be asked for besides `localhost`.
    """
    match = _HOST.fullmatch(header or "")
    if match is None:
        return False
    name = match[1].lower().strip("[]").removesuffix(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == LOCALHOST or name in names
    # Nobody can point an address elsewhere; but on loopback nobody else's is meant.
    return is_loopback(name) or not loopback or name in names


def url(address: str, port: int, hostname: str) -> str:
    """Return where the page is, by the host's name where it listens at all addresses."""
    if ipaddress.ip_address(address).is_unspecified:
        address = hostname
    return f"http://[{address}]:{port}/" if ":" in address else f"http://{address}:{port}/"
