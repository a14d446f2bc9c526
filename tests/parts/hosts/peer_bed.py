"""One cell of the matrix: how one version reaches N hosts over limited links, with or without a fault."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import xxhash
from links import Links
from safetensors.numpy import save_file
from support.jobs import start
from support.paths import ROOT, TESTS

import syncd.protocol.delta
from syncd.parts.hosts.members import MEMBERS, TOKEN, encode_members, new_token
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.manifest import read_manifest
from syncd.publishing import FollowingDisk, publish_export, read_export

SHARDS = 4
HERE = TESTS / "parts" / "hosts"

TILE = 256 << 10  # as much smaller than the product's as links are slower: a host of 16 reads 6 to 12 pieces

WAYS = ("whole", "delta", "join")
"""whole: a step. delta: changes of a step that all have. join: half of the hosts have the step, the others come."""

FAULTS = ("none", "killed", "slow", "liar", "late", "dead", "lists", "token")
"""killed, slow: one host, after a third of the time of one copy; slow: a tenth of its speed. liar: it gives wrong
bytes for each fifth piece. late: two more hosts come after half of the time. dead: no other host is there. lists:
each host leaves another out of its list. token: every host has a token of its own."""


@dataclass(frozen=True)
class Cell:
    hosts: int
    way: str = "whole"
    fault: str = "none"
    peers: bool = True
    origin: float = 2.0  # MB/s of the origin's link; a host's has twice that, each way
    mib: int = 24  # the bytes of the step, or of twice the changes
    kills: tuple[tuple[str, float], ...] = ()  # further hosts that are killed, and when
    limit: float = 300.0


@dataclass
class World:
    """The files of a cell, and its processes."""

    place: str
    cell: Cell
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)

    def path(self, name):
        return f"{self.place}/{name}"


def run_cell(cell, keep=False):
    """Run one cell; return what came of it."""
    place = tempfile.mkdtemp(prefix="peers-", dir="/dev/shm")
    world = World(place, cell)
    try:
        late = 2 if cell.fault == "late" else 0
        with (
            mock.patch.object(syncd.protocol.delta, "TILE", TILE),
            Links(cell.hosts + late, cell.origin, 2 * cell.origin, 2 * cell.origin) as links,
        ):
            job, expected = _make_job(world)
            return _measure(world, links, job, expected)
    finally:
        for process in world.processes.values():
            process.kill()
            process.wait()
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def _make_job(world):
    os.mkdir(world.path("job"))
    job = Job.at(world.path("job"))
    daemon, *_ = start(job, SystemClock(), keep_last=20)
    model = _Model(world.cell.mib * (2 if world.cell.way == "delta" else 1))  # its changes are half as large
    _publish(job, 1, model.export(world.path("export1")))
    daemon.tick(woken=True)
    if world.cell.way == "delta":
        from syncd.transports.delta.publish import publish_delta

        export = read_export(FollowingDisk(), model.train().export(world.path("export2")))
        made = publish_delta(job, 2, FollowingDisk(), export, 1)
        assert made.why_whole == "", made
        daemon.tick(woken=True)
    daemon.close()
    job.disk.replace(f"{job.state}/{TOKEN}", new_token())
    wanted = 2 if world.cell.way == "delta" else 1
    expected = _digests(world.path(f"export{wanted}"))
    shutil.rmtree(world.path("export1"))
    return job, (wanted, expected)


class _Model:
    def __init__(self, mib):
        self._random = np.random.default_rng(7)
        words = (mib << 20) // SHARDS // 2 // 3
        self.shards = [
            {
                f"w{shard}.{number}": (self._random.standard_normal(words) * 0.02).astype(np.float16)
                for number in range(3)
            }
            for shard in range(SHARDS)
        ]

    def train(self):
        for tensors in self.shards:
            for tensor in tensors.values():
                words = tensor.view(np.uint16)
                changes = self._random.integers(1, 60, words.shape, np.uint16)
                words += changes * (self._random.random(words.shape) < 0.35)
        return self

    def export(self, directory):
        os.makedirs(directory)
        names = [f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors" for shard in range(SHARDS)]
        for name, tensors in zip(names, self.shards, strict=True):
            save_file(tensors, f"{directory}/{name}", metadata={"format": "pt"})
        places = {
            tensor: name for name, tensors in zip(names, self.shards, strict=True) for tensor in tensors
        }
        for name, document in (
            ("model.safetensors.index.json", {"weight_map": places}),
            ("config.json", {"a": 1}),
        ):
            with open(f"{directory}/{name}", "w") as file:
                json.dump(document, file)
        return directory


def _publish(job, step, directory):
    publish_export(job, step, FollowingDisk(), read_export(FollowingDisk(), directory))


def _digests(directory):
    found = {}
    for name in os.listdir(directory):
        with open(f"{directory}/{name}", "rb") as file:
            found[name] = xxhash.xxh3_128_hexdigest(file.read())
    return found


def stored_size(job, step):
    manifest = read_manifest(job.disk, job.step(step))
    return sum(record.size for record in (*manifest.shards, *manifest.files))


def _measure(world, links, job, expected):
    cell, (wanted, files) = world.cell, expected
    size = stored_size(job, wanted)
    copy = size / (cell.origin * 1e6)
    names = [f"h{number}" for number in range(cell.hosts)]
    late = [f"h{cell.hosts + number}" for number in range(2)] if cell.fault == "late" else []
    members = {name: f"{links.ip(name)}:7410" for name in names}
    job.disk.replace(f"{job.state}/{MEMBERS}", encode_members(sorted(members.values()), 1))
    joiners = names[cell.hosts // 2 :] if cell.way == "join" else names
    _start_origin(world, links)
    dead = set(names[1:]) if cell.fault == "dead" else set()
    for number, name in enumerate((*names, *late)):
        if name not in dead:
            has = {"whole": 0, "delta": 1, "join": 0 if name in joiners or name in late else 1}[cell.way]
            _start_host(
                world,
                links,
                name,
                has=has,
                wants=wanted if has != wanted else 0,
                after=copy / 2 if name in late else 0.0,
                liar=cell.fault == "liar" and name == "h1",
                token=f"{number:064x}" if cell.fault == "token" else "",
                members=_other_list(members, number) if cell.fault == "lists" and name in members else None,
            )
    _await(world, [f"{name}.ready" for name in (*names, *late) if name not in dead], 120)
    time.sleep(0.3)
    sent, wire, begun = _sent(world), links.sent("o"), time.monotonic()
    open(world.path("go"), "w").close()
    killed = _inject(world, links, copy, begun)
    measured = [name for name in (*joiners, *late) if name not in dead | killed]
    healthy = [name for name in measured if not (cell.fault == "slow" and name == "h1")]
    lines = _collect(world, healthy, cell.limit)
    sent, wire = _sent(world) - sent, links.sent("o") - wire
    lines |= _collect(world, [name for name in measured if name not in lines], 10 * copy + 30)
    open(world.path("end"), "w").close()
    return _row(cell, size, copy, (sent, wire), lines, healthy, late, files)


def _sent(world):
    """Return the bytes of files that the origin has sent."""
    with open(world.path("o.sent")) as file:
        return sum(map(int, file.read().split()))


def _row(cell, size, copy, sent, lines, healthy, late, files):
    on_time = [lines[name]["seconds"] for name in healthy if name in lines and name not in late]
    whole = len(on_time) == len([name for name in healthy if name not in late])
    return {
        "hosts": cell.hosts,
        "way": cell.way,
        "fault": cell.fault if not cell.kills else "kills",
        "peers": cell.peers,
        "seconds": round(max(on_time), 2) if whole and on_time else None,
        "one_copy": round(copy, 2),
        "time": round(max(on_time) / copy, 3) if whole and on_time else None,
        "copies": round(sent[0] / size, 3),
        "wire": round(sent[1] / size, 3),  # with the headers of packets, and what was sent again
        "late": [round(lines[name]["seconds"], 2) for name in late if name in lines],
        "right": all(line["files"] == files for line in lines.values()),
        "done": f"{len(lines)}/{len(healthy) + (cell.fault == 'slow' and cell.way != 'join')}",
        "memory": max((line["memory"] for line in lines.values()), default=0),
        "cpu": round(sum(line["cpu"] for line in lines.values()), 2),
        "wrong": sum(heard["wrong"] for heard in _heard(lines, "peers_removed")),
        "over_budget": len(_heard(lines, "origin_budget_exceeded")),
        "removed": sorted(
            {why for heard in _heard(lines, "peers_removed") for why in heard["hosts"].values()}
        ),
        "load": round(os.getloadavg()[0], 1),
    }


def _heard(lines, event):
    return [fields for line in lines.values() for name, fields in line["told"] if name == event]


def _other_list(members, number):
    """Return the list of one host, which leaves out the host after it."""
    names = sorted(members)
    left_out = names[(number + 1) % len(names)]
    return [address for name, address in members.items() if name != left_out]


def _start_origin(world, links):
    program = str(HERE / "programs" / "bed_origin.py")
    command = [
        sys.executable,
        program,
        world.path("job"),
        "8000",
        world.path("o.ready"),
        world.path("o.sent"),
    ]
    world.processes["o"] = links.popen("o", command, stdout=subprocess.DEVNULL)
    _await(world, ["o.ready"], 60)


def _start_host(world, links, name, **more):
    conf = {
        "name": name,
        "ip": links.ip(name),
        "job": world.path("job"),
        "stage": world.path(name),
        "origin": f"{links.ip('o')}:8000",
        "tile": TILE,
        "peers": world.cell.peers,
        "ready": world.path(f"{name}.ready"),
        "go": world.path("go"),
        "end": world.path("end"),
        **more,
    }
    with open(world.path(f"{name}.json"), "w") as file:
        json.dump(conf, file)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}"}
    command = [sys.executable, str(HERE / "programs" / "bed_host.py"), world.path(f"{name}.json")]
    with open(world.path(f"{name}.out"), "wb") as out, open(world.path(f"{name}.err"), "wb") as err:
        world.processes[name] = links.popen(name, command, stdout=out, stderr=err, env=environment)


def _await(world, names, seconds):
    deadline = time.monotonic() + seconds
    while not all(os.path.exists(world.path(name)) for name in names):
        for name, process in world.processes.items():
            if process.poll() is not None:
                error = world.path(f"{name}.err")
                with contextlib.suppress(FileNotFoundError), open(error) as file:
                    raise RuntimeError(f"{name} has ended: {file.read()[-2000:]}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"not there in {seconds} s: {names}")
        time.sleep(0.02)


def _inject(world, links, copy, begun):
    """Do what the cell's fault says; return the hosts that are killed."""
    fault, killed = world.cell.fault, set()
    kills = [("h1", copy / 3)] if fault == "killed" else []
    for name, when in sorted((*kills, *world.cell.kills), key=lambda kill: kill[1]):
        time.sleep(max(begun + when - time.monotonic(), 0))
        world.processes[name].kill()
        world.processes[name].wait()
        killed.add(name)
    if fault == "slow":
        time.sleep(max(begun + copy / 3 - time.monotonic(), 0))
        links.slow_down("h1", 10)
    return killed


def _collect(world, names, seconds):
    lines, deadline = {}, time.monotonic() + seconds
    while len(lines) < len(names) and time.monotonic() < deadline:
        for name in names:
            path = world.path(f"{name}.out")
            if name not in lines and os.path.getsize(path):
                with open(path) as file:
                    lines[name] = json.loads(file.readline())
            elif name not in lines and world.processes[name].poll() is not None:
                with open(world.path(f"{name}.err")) as file:
                    raise RuntimeError(f"{name} has ended: {file.read()[-2000:]}")
        time.sleep(0.02)
    return lines


def random_kills(seed, hosts=4):
    """Return a cell with up to `hosts - 1` kills at random moments."""
    chance = random.Random(seed)
    doomed = chance.sample([f"h{number}" for number in range(hosts)], chance.randint(1, hosts - 1))
    kills = tuple((name, chance.uniform(0.0, 4.0)) for name in doomed)
    return Cell(hosts, chance.choice(("whole", "delta")), kills=kills, origin=4.0, mib=12)


if __name__ == "__main__":
    cell = Cell(int(sys.argv[1]), *(sys.argv[2:4]), peers="alone" not in sys.argv)
    print(json.dumps(run_cell(cell)))
