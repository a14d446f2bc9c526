"""Looks after the machine that nfs-bed boots: alive.py BED SECONDS

Ends it when it stands still: no sign of life from inside (BED/out/heartbeat, which goes past NFS) for so long.
What it was at is asked first, of its kernel (mconsole) and of the host's, and left in BED/out/standstill.log: that
file is there exactly when the machine itself stood still, which says nothing about what ran in it.
"""

import contextlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator

_MAGIC, _VERSION = 0xCAFEBABE, 2
_QUESTIONS = ("version", "proc uptime", "proc loadavg", "proc interrupts", "sysrq w")
"""The first is answered by an interrupt, the others by a thread of the kernel: some may go without an answer."""


def main(bed: str, patience: str) -> None:
    """Watch until nfs-bed ends this, or the machine is ended from here."""
    last, silent = "", 0
    # Looks are counted, not seconds: a host that sleeps does not look either.
    while silent < int(patience):
        time.sleep(1)
        sign = _sign(f"{bed}/out/heartbeat")
        silent = 0 if sign != last else silent + 1
        last = sign
    why = f"{silent} looks without a sign of life; the last one: {last}"
    with open(f"{bed}/out/standstill.log", "w", encoding="utf-8") as log:
        log.writelines(f"{line}\n" for line in _evidence(bed, why))
    # The kernel is the first of them; nfs-bed ends this one as soon as it is gone.
    for pid in sorted(_processes(bed), reverse=True):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _sign(path: str) -> str:
    """Return something that differs from one sign of life to the next."""
    with contextlib.suppress(OSError):
        return f"{_text(path).strip()} s up, at {os.stat(path).st_mtime:.1f}"
    return "none since the start"


def _evidence(bed: str, why: str) -> Iterator[str]:
    yield f"{why}; load of the host: {_text('/proc/loadavg')}"
    before = {pid: _ticks(pid) for pid in _processes(bed)}
    for question in _QUESTIONS:
        yield f"{question}: {_ask(bed, question)}"
    for pid in _processes(bed):
        state = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1]
        ticks = _ticks(pid) - before.get(pid, 0)
        yield f"process {pid}: {state}, waits in {_text(f'/proc/{pid}/wchan')}, {ticks} ticks of CPU meanwhile"


def _processes(bed: str) -> list[int]:
    """Return the processes of the machine: those of the session that its kernel leads."""
    found = []
    for umid in _listed(f"{bed}/.uml"):
        leader = _text(f"{bed}/.uml/{umid}/pid").strip()
        for pid in filter(str.isdigit, _listed("/proc")):
            fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
            if leader and fields and leader in (pid, fields[3]):
                found.append(int(pid))
    return found


def _listed(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(path)
    return []


def _text(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


def _ticks(pid: int) -> int:
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:13])


def _ask(bed: str, question: str) -> str:
    """Ask the machine's kernel something through its management console."""
    try:
        with contextlib.ExitStack() as stack:
            return "".join(_answer(bed, question, stack))
    except OSError as error:
        return f"no answer ({error or type(error).__name__})"


def _answer(bed: str, question: str, stack: contextlib.ExitStack) -> Iterator[str]:
    umid = _listed(f"{bed}/.uml")[0]
    # The name of a socket has a hundred characters at most: the directory is named by a descriptor.
    directory = os.open(f"{bed}/.uml/{umid}", os.O_PATH)
    stack.callback(os.close, directory)
    line = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    line.bind("")
    line.settimeout(3)
    line.connect(f"/proc/self/fd/{directory}/mconsole")
    line.send(struct.pack("=III512s", _MAGIC, _VERSION, len(question), question.encode()))
    more = 1
    while more:
        _, more, length = struct.unpack_from("=III", answer := line.recv(1 << 16))
        yield answer[12 : 12 + length].decode(errors="replace")


if __name__ == "__main__":
    main(*sys.argv[1:])
