"""A host of the bed: a follower's way to a version, with the origin behind a limited link. Prints one line of JSON.

python bed_host.py SETTINGS.json
"""

import http.client
import json
import os
import sys
import threading
import time

import xxhash

import syncd.protocol.delta
import syncd.protocol.safetensors

with open(sys.argv[1]) as file:
    conf = json.load(file)
# Links are slow, so that they are what is measured and not the CPU; tiles are as much smaller.
syncd.protocol.delta.TILE = conf["tile"]
syncd.protocol.safetensors._FIRST_READ = 2 << 10

from support.fake_hook import FakeEngine, FakeHook  # noqa: E402

import syncd.transports.delta.chain  # noqa: E402
import syncd.transports.delta.source  # noqa: E402 - imports are not what is measured
from explorer_hooks.follower.policy import FollowOptions  # noqa: E402
from explorer_hooks.follower.versions import Fetcher  # noqa: E402
from syncd.client.client import Client  # noqa: E402
from syncd.parts.hosts import reader, server  # noqa: E402
from syncd.parts.hosts.blame import OriginRate  # noqa: E402
from syncd.protocol.local_disk import LocalDisk  # noqa: E402
from syncd.transports.files.leased_directory import LoadTimings  # noqa: E402


class OriginDisk(LocalDisk):
    """Reads what lies in steps through the link to the origin, once `is_far` is set."""

    is_far = False
    _connections = threading.local()

    def read_at(self, path, offset, length, *, ahead=True):
        if not self.is_far or "/global_step_" not in path:
            return super().read_at(path, offset, length, ahead=ahead)
        return self._far(path, offset, length)

    def read(self, path, limit=16 << 20):
        if not self.is_far or "/global_step_" not in path:
            return super().read(path, limit)
        return self._far(path, 0, limit)

    def _far(self, path, offset, length):
        os.stat(path)  # a missing file is missing
        for attempt in range(20):
            try:
                connection = getattr(self._connections, "one", None)
                if connection is None:
                    connection = self._connections.one = http.client.HTTPConnection(
                        conf["origin"], timeout=60
                    )
                where = path.removeprefix(conf["job"])
                connection.request("GET", where, headers={"Range": f"bytes={offset}-{offset + length - 1}"})
                return connection.getresponse().read()
            except OSError:
                self._connections.one = None  # as a mount does: the server is waited for
                time.sleep(0.1 * attempt)
        raise OSError("the origin does not answer")


def memory():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10


class Peak(threading.Thread):
    """Samples the memory of this process that is not the stage's."""

    def __init__(self):
        super().__init__(daemon=True)
        self.before = self.most = memory()

    def run(self):
        while True:
            self.most = max(self.most, memory())
            time.sleep(0.05)


def lie():
    honest = server.PieceHandler._piece

    def piece(self, kind, digest, number, file, offset, length):
        if number % 5:
            honest(self, kind, digest, number, file, offset, length)
            return
        self._answer(server.HTTPStatus.OK, length)
        self.wfile.write(os.urandom(length))

    server.PieceHandler._piece = piece


def touch(path):
    open(path, "w").close()


if conf.get("liar"):
    lie()
if conf.get("token"):
    reader.read_token = lambda job: conf["token"]
if conf.get("members"):
    reader.read_members = lambda job: sorted(conf["members"])

syncd.transports.delta.chain._AHEAD = conf["tile"] // 2  # as much smaller as tiles
told = []
disk = OriginDisk()
client = Client.open(conf["job"], "explorer", conf["name"], disk=disk)
address = f"{conf['ip']}:7410"
options = FollowOptions(stage=conf["stage"], peers=address if conf["peers"] else None)
tell = lambda level, name, **fields: told.append([name, fields])  # noqa: E731
fetcher = Fetcher(client, FakeHook(FakeEngine()), options, lambda: False, tell)
before = None
if conf["has"]:
    fetcher._reader._rate.note(1 << 50, 1.0)  # read alone, and nothing is measured yet
    before = fetcher.fetch(conf["has"], LoadTimings(client.clock))
if conf["peers"]:
    fetcher._reader._rate, fetcher._reader._is_auto = OriginRate(), False
disk.is_far = True
touch(conf["ready"])
while not os.path.exists(conf["go"]):
    time.sleep(0.01)
time.sleep(conf["after"])
if conf["wants"]:
    peak = Peak()
    peak.start()
    begun, cpu, bytes_before = time.monotonic(), time.process_time(), fetcher._reader.bytes_by_source()
    del told[:]
    held = fetcher.fetch(conf["wants"], LoadTimings(client.clock))
    seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
    after = fetcher._reader.bytes_by_source()
    disk.is_far = False
    files = {}
    for place, _, names in os.walk(held.directory.path):
        for name in names:
            path = os.path.join(place, name)
            with open(path, "rb") as file:
                files[os.path.relpath(path, held.directory.path)] = xxhash.xxh3_128_hexdigest(file.read())
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu": cpu,
                "files": files,
                "bytes": {name: after[name] - bytes_before.get(name, 0) for name in after},
                "memory": peak.most - peak.before,
                "source": held.shown_source,
                "told": told,
            },
            default=str,
        ),
        flush=True,
    )
while not os.path.exists(conf["end"]):
    time.sleep(0.05)
