"""libtorrent for benchmarks/readers.py: a seed, or one reader. Runs in an environment with libtorrent alone.

    python readers_torrent.py seed SETTINGS    # hashes, seeds until standard input ends
    python readers_torrent.py get SETTINGS     # begins at a line; a line of JSON when all is there; seeds to the end

No address but those given is asked anything: no DHT, local discovery, peer exchange, trackers or port mapping.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import libtorrent as lt

_PORT = 7001


def _session(ip: str) -> Any:
    off = (
        "enable_dht",
        "enable_lsd",
        "enable_upnp",
        "enable_natpmp",
        "enable_outgoing_utp",
        "enable_incoming_utp",
    )
    return lt.session(
        {
            "listen_interfaces": f"{ip}:{_PORT}",
            **dict.fromkeys(off, False),
            "allow_multiple_connections_per_ip": True,
            "out_enc_policy": 2,  # none: it hides nothing here and costs time
            "in_enc_policy": 2,
            "connections_limit": 400,
            "aio_threads": 2,
            "hashing_threads": 1,
            "alert_mask": 0,
            "min_reconnect_time": 1,
            "smooth_connects": False,
            "connection_speed": 200,
            "no_connect_privileged_ports": False,
        }
    )


def _added(session: Any, torrent: str, place: str, more: Any) -> Any:
    params = lt.add_torrent_params()
    params.ti, params.save_path = lt.torrent_info(torrent), place
    flags = lt.torrent_flags
    params.flags |= flags.disable_dht | flags.disable_lsd | flags.disable_pex
    params.flags &= ~(flags.auto_managed | flags.paused)
    params.flags |= more
    return session.add_torrent(params)


def seed(settings: dict[str, Any]) -> None:
    """Write the torrent of a directory, and give it away."""
    directory = settings["directory"]
    maker = lt.create_torrent(lt.list_files(directory), settings["piece"], lt.create_torrent_flags_t.v2_only)
    lt.set_piece_hashes(maker, os.path.dirname(directory))
    Path(settings["torrent"]).write_bytes(lt.bencode(maker.generate()))
    session = _session(settings["ip"])
    flags = lt.torrent_flags.seed_mode
    if settings["super"]:
        flags |= lt.torrent_flags.super_seeding
    _added(session, settings["torrent"], os.path.dirname(directory), flags)
    print("seeds", flush=True)
    sys.stdin.read()


def get(settings: dict[str, Any]) -> None:
    """Take everything; then give it to others until the end."""
    print("ready", flush=True)
    sys.stdin.readline()
    before, begun = _peak(), time.process_time()
    session = _session(settings["ip"])
    handle = _added(session, settings["torrent"], settings["target"], 0)
    others = [ip for ip in settings["peers"] if ip != settings["ip"]]
    asked = 0.0
    while not handle.status().is_seeding:
        if time.monotonic() > asked + 1:
            asked = time.monotonic()
            for ip in others:
                handle.connect_peer((ip, _PORT))
        time.sleep(0.02)
    found = {"ended": time.monotonic(), "cpu": time.process_time() - begun, "memory": _peak() - before}
    Path(f"{settings['end']}-{settings['ip']}").touch()
    deadline = time.monotonic() + settings["limit"]
    while not all(Path(f"{settings['end']}-{ip}").exists() for ip in settings["peers"][1:]):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    print(json.dumps(found), flush=True)


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    {"seed": seed, "get": get}[sys.argv[1]](json.loads(sys.argv[2]))
