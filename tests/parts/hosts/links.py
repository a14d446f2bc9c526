"""Slow links between network namespaces of this machine: an origin and hosts around a bridge. Needs root, ip and tc.

Each end sends through a token bucket, so a link that becomes slower is one `tc qdisc replace`. The ports of the
bridge count what each end has really sent, headers and repeats included. Nothing leads out of the bridge's
namespace.
"""

import functools
import os
import shutil
import subprocess
import uuid

ORIGIN = "10.77.0.1"


@functools.cache
def no_links():
    """Return why no such links can be made here, empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"{program} is not installed (iproute2)"
    try:
        with Links(1, 8, 8, 8):
            return ""
    except (RuntimeError, OSError) as error:
        return f"no network namespaces with limited links: {error}"


def _run(command, *, check=True):
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
    return done.stdout


class Links:
    """Namespaces `o` and `h0` to `hN`; rates in MB/s."""

    def __init__(self, hosts, origin, up, down):
        self._tag, self._names = f"sp{uuid.uuid4().hex[:5]}", ["o", *(f"h{host}" for host in range(hosts))]
        self._rates = {name: (origin, 4 * origin) if name == "o" else (up, down) for name in self._names}

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in ("sw", *self._names):
            _run(f"ip netns del {self.space(name)}", check=False)

    def ip(self, name):
        return ORIGIN if name == "o" else f"10.77.0.{10 + int(name[1:])}"

    def popen(self, name, command, **more):
        """Start a program in a namespace; the process is the program itself."""
        return subprocess.Popen(["ip", "netns", "exec", self.space(name), *command], **more)

    def slow_down(self, name, factor):
        up, down = self._rates[name]
        self._limit(name, up / factor, down / factor)

    def sent(self, name):
        """Return the bytes that an end has sent."""
        command = f"ip netns exec {self.space('sw')} cat /sys/class/net/{name}/statistics/rx_bytes"
        return int(_run(command))

    def _make(self):
        _run(f"ip netns add {self.space('sw')}")
        bridge = f"ip -n {self.space('sw')} link"
        _run(f"{bridge} add name sw0 type bridge && {bridge} set sw0 up")
        for name in self._names:
            self._plug(name)

    def _plug(self, name):
        space, switch = self.space(name), self.space("sw")
        _run(f"ip netns add {space}")
        _run(f"ip -n {switch} link add name {name} type veth peer name e0 netns {space}")
        _run(f"ip -n {switch} link set {name} master sw0 up")
        _run(f"ip -n {space} addr add {self.ip(name)}/24 dev e0")
        _run(f"ip -n {space} link set e0 up && ip -n {space} link set lo up")
        self._limit(name, *self._rates[name])

    def _limit(self, name, up, down):
        _run(f"tc -n {self.space(name)} qdisc replace dev e0 root {_bucket(up)}")
        _run(f"tc -n {self.space('sw')} qdisc replace dev {name} root {_bucket(down)}")

    def space(self, name):
        """Return the name of the namespace of an end."""
        return f"{self._tag}-{name}"


def _bucket(rate):
    # The burst holds one unsplit segment of 64 KiB, or the rate is not reached; 60 ms of queue.
    return f"tbf rate {int(rate * 8000)}kbit burst 256kb latency 60ms"
