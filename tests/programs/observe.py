"""Watches a job on its file server: observe.py JOB OUT

Prints "ready", then notes each replacement of the marker and of the version file with the time at which the
server's own kernel did it, one JSON line each: {"file", "step", "generation", "at"}, of a version its term too.
Ends when OUT.stop is there.
"""

import contextlib
import ctypes
import json
import os
import select
import struct
import sys
import time

IN_MOVED_TO = 0x80
MARKER = "latest_state_dict_iteration.txt"
VERSION = "version.json"
_EVENT = struct.Struct("iIII")


def watch(directories):
    """Return an inotify descriptor, and the directory of each of its watches."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_CLOEXEC)
    watches = {libc.inotify_add_watch(descriptor, path.encode(), IN_MOVED_TO): path for path in directories}
    if descriptor < 0 or -1 in watches:
        raise OSError(ctypes.get_errno(), "inotify")
    return descriptor, watches


def events(descriptor):
    """Yield (watch, name) of what the kernel has queued."""
    data = os.read(descriptor, 1 << 16)
    while data:
        number, _, _, length = _EVENT.unpack_from(data)
        yield number, data[_EVENT.size : _EVENT.size + length].rstrip(b"\0").decode()
        data = data[_EVENT.size + length :]


def note(directory, name, at):
    """Return the record of one replacement; a newer content than the event's only makes latencies longer."""
    with open(f"{directory}/{name}", encoding="ascii") as file:
        text = file.read()
    if name == MARKER:
        return {"file": "marker", "step": int(text), "generation": None, "at": at}
    document = json.loads(text)
    return {"file": "version", **{key: document[key] for key in ("step", "generation", "term")}, "at": at}


def main(job, out):
    os.makedirs(f"{job}/.syncd", exist_ok=True)
    descriptor, watches = watch([job, f"{job}/.syncd"])
    print("ready", flush=True)
    with open(out, "w", encoding="ascii") as log:
        while not os.path.exists(f"{out}.stop"):
            if not select.select([descriptor], [], [], 0.5)[0]:
                continue
            at = time.monotonic()
            for number, name in events(descriptor):
                if name in (MARKER, VERSION):
                    with contextlib.suppress(FileNotFoundError):
                        log.write(json.dumps(note(watches[number], name, at)) + "\n")
        log.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
