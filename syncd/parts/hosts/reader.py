"""The reader that a follower opens: it gets what a stage wants together with other hosts."""

import contextlib
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from syncd.errors import ConfigError, CorruptDataError, SyncdError
from syncd.parts.hosts.asking import hosts_that_have
from syncd.parts.hosts.blame import OriginRate, is_quick_alone
from syncd.parts.hosts.gather import Gather, Tally, Together
from syncd.parts.hosts.gather_pool import GatherPool
from syncd.parts.hosts.members import INFO, is_address, read_members, read_token
from syncd.parts.hosts.nearer_disk import HeadsDisk, LocalFile, NearerDisk
from syncd.parts.hosts.order import order_of
from syncd.parts.hosts.pieces import PiecePlan, made_tiles, plan_containers, plan_copy, stored_tiles
from syncd.parts.hosts.server import PieceServer, bind_or_none
from syncd.parts.hosts.shelf import LivePieces, Shelf, key_of
from syncd.protocol.delta import tiles
from syncd.protocol.disk import MISSING, Disk
from syncd.protocol.file_lock import FileLock, lock_file
from syncd.protocol.lineage import containers
from syncd.protocol.manifest import Manifest, read_manifest
from syncd.protocol.read_bytes import INFO as READ
from syncd.protocol.read_bytes import ReadBytes
from syncd.protocol.safetensors import Header
from syncd.transports.files.copy_files import copy_files, make_directories
from syncd.transports.files.piece_reader import ByteSpan, PartialFile, PieceReader, ReaderContext, WantedFiles

ASKED = 16  # hosts that are asked whether they have all of a step

_ADDRESS = re.compile(r"(?P<host>\[[^]]*\]|[^:\[\]]*):(?P<port>[0-9]{1,5})", re.ASCII)
_MOST_PORT = 65535
_HINT = "--peers HOST:PORT, where HOST is the address of this host in the cluster's network"


def split_address(text: str) -> tuple[str, int]:
    """Return the host of `HOST:PORT`, this host's name where there is none, and the port."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > _MOST_PORT:
        raise ConfigError(f"{text[:80]!r} is no address to give pieces at", hint=_HINT)
    host = match["host"].strip("[]") or socket.gethostname()
    if not is_address(f"[{host}]:0" if ":" in host else f"{host}:0"):
        raise ConfigError(f"{host[:80]!r} is no host to give pieces at", hint=_HINT)
    if host in ("0.0.0.0", "::"):  # noqa: S104 - refused
        raise ConfigError(f"{host} is not an address that other hosts can ask", hint=_HINT)
    return host, int(match["port"])


def open_reader(context: ReaderContext) -> "HostsReader":
    return HostsReader(context)


class HostsReader(PieceReader):
    """Gets the files of steps together with the hosts that the job's leader lists.

    Args:
        is_auto: Whether it reads alone where that is as quick.
    """

    is_shared = True

    def __init__(self, context: ReaderContext, *, is_auto: bool = True) -> None:
        self._client, self._report, self._is_auto = context.client, context.report, is_auto
        self._host, self._port = split_address(context.address)
        self._shelf = Shelf(context.stage)
        self._gathers: dict[str, Gather] = {}
        self._live: list[LivePieces] = []
        self._kept: dict[str, FileLock] = {}  # of containers, by their directory
        self._server: PieceServer | None = None
        self._bytes, self._counting = {"origin": 0, "peers": 0}, threading.Lock()
        self._is_over_budget = False
        self._rate = OriginRate()
        self._tokens = _CachedToken(lambda: read_token(self._client.job))
        self._listen()
        self.address = self._own_address()
        if self._server is None:
            self._report("info", "peers_address_shared", address=self.address)
        self._describe()

    def copy(self, wanted: WantedFiles, target: str, stop: Callable[[], bool]) -> None:
        manifest = read_manifest(wanted.disk, os.path.dirname(wanted.directory))
        if manifest.digest != wanted.digest:
            raise CorruptDataError("its manifest is another one by now", path=wanted.directory)
        stored = stored_tiles(wanted.disk, wanted.directory, manifest)
        if stored is None and manifest.shortcut is not None:
            stored = made_tiles(self._client.job, wanted.directory, manifest)
        plan = plan_copy(wanted.directory, wanted.records, stored)
        token, members = self._tokens(), read_members(self._client.job)
        if not plan.pieces or (not wanted.partial and (token is None or not members)):
            copy_files(wanted.disk, wanted.directory, target, wanted.records, stop)
            self._count(Tally(origin=plan.size, share=plan.size))
            return
        make_directories(target, wanted.records)
        hosts = self._hosts(members, plan, "copy", wanted.digest) if token else [self.address]
        self._gather(plan, wanted, hosts, target, stop)

    def share(self, headers: Mapping[str, Header]) -> dict[str, Sequence[ByteSpan]]:
        names = sorted(headers)
        spans = [
            (name, ByteSpan(tile.offset, tile.length)) for name in names for tile in tiles(headers[name])
        ]
        members = read_members(self._client.job) if self._tokens() else []
        if self._is_auto and is_quick_alone(sum(span.length for _, span in spans), self._rate.known):
            members = []
        shares = dict[str, list[ByteSpan]]()
        for number, (name, span) in enumerate(spans):
            if order_of(number, members)[:1] in ([], [self.address]):
                shares.setdefault(name, []).append(span)
        return dict(shares)

    def add_unused(self, size: int) -> None:
        self._add(origin=size, peers=0)

    def _add(self, *, origin: int, peers: int) -> None:
        with self._counting:  # two threads read
            self._bytes["origin"] += origin
            self._bytes["peers"] += peers

    def copy_made(
        self, manifest: Manifest, wanted: WantedFiles, target: str, stop: Callable[[], bool]
    ) -> bool:
        token, members = self._tokens(), read_members(self._client.job)
        if token is None:
            return False
        have = self._that_have(members, "copy", wanted.digest, token)
        made = made_tiles(self._client.job, wanted.directory, manifest) if have else None
        if made is None:
            return False
        plan = plan_copy(wanted.directory, wanted.records, made)
        make_directories(target, wanted.records)
        try:
            self._gather(plan, wanted, have, target, stop)
        except (*MISSING, SyncdError) as error:
            # What no other host gave is not in the file system under this name: the chain makes it.
            shutil.rmtree(target)
            if stop():
                raise
            self._report("warning", "peers_failed", step=manifest.step, reason=str(error))
            return False
        return True

    @contextlib.contextmanager
    def nearer(self, links: Sequence[Manifest], stop: Callable[[], bool]) -> Iterator[Disk | None]:
        token, members = self._tokens(), read_members(self._client.job)
        if token is None or not members:
            yield None
            return
        self._drop_live()
        self._drop_containers(links)
        with contextlib.closing(GatherPool(stop)) as pool, contextlib.ExitStack() as arriving:
            places = dict[str, LocalFile]()
            for link in links:
                places |= arriving.enter_context(self._containers(pool, link, members))
            yield NearerDisk(self._client.job.disk, places)

    def bytes_by_source(self) -> Mapping[str, int]:
        return dict(self._bytes)

    def close(self) -> None:
        self._drop_live()
        self._drop_containers()
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    # --- one step -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _containers(
        self, pool: GatherPool, link: Manifest, members: list[str]
    ) -> Iterator[dict[str, LocalFile]]:
        """Get the containers of a step while the block lasts; yield where this host has them, by where the job does.

        They may still be on their way; the block's end waits for them.
        """
        job, step = self._client.job, self._client.job.step(link.step)
        disk = HeadsDisk(job.disk)
        plan = plan_containers(step, link.containers, containers(replace(job, disk=disk), link))
        disk.keep_no_more()
        path = f"{self._shelf.directory}/containers-{key_of(link.digest)}"
        if path in self._kept:
            yield {file.path: LocalFile(f"{path}/{file.name}") for file in plan.files}
            return
        held = lock_file(f"{path}.lock", exclusive=True) if plan.pieces else None
        if held is None:  # another process of this host gets them, or nothing has changed
            yield {}
            return
        try:
            shutil.rmtree(path, ignore_errors=True)
            make_directories(path, link.containers)
            hosts = self._hosts(members, plan, "containers", link.digest)
            with self._begun(pool, "containers", plan, link.digest, hosts, path, disk, {}) as gather:
                yield {
                    file.path: LocalFile(f"{path}/{file.name}", partial(gather.await_bytes, number))
                    for number, file in enumerate(plan.files)
                }
        except BaseException:
            self._drop_live()
            shutil.rmtree(path, ignore_errors=True)
            held.remove()
            raise
        if held.share():
            self._kept[path] = held

    def _drop_containers(self, keep: Sequence[Manifest] = ()) -> None:
        """Give up the containers of other steps; the stage removes them."""
        names = {f"{self._shelf.directory}/containers-{key_of(link.digest)}" for link in keep}
        for path in self._kept.keys() - names:
            self._kept.pop(path).close()

    def _hosts(self, members: list[str], plan: PiecePlan, kind: str, digest: str) -> list[str]:
        """Return whom pieces are asked of: those that have all, else all in turn; nobody if that is as quick."""
        if self._is_auto and is_quick_alone(plan.size, self._rate.known):
            return [self.address]
        token = self._tokens()
        have = self._that_have(members, kind, digest, token) if token else []
        return have or members

    def _that_have(self, members: list[str], kind: str, digest: str, token: str) -> list[str]:
        others = [host for host in members if host != self.address]
        begin = hash(self.address) % max(len(others), 1)  # late hosts ask different ones
        asked = [*others[begin:], *others[:begin]][:ASKED]
        return sorted(hosts_that_have(asked, f"/have/{kind}/{key_of(digest)}", token))

    def _gather(
        self, plan: PiecePlan, wanted: WantedFiles, hosts: list[str], target: str, stop: Callable[[], bool]
    ) -> None:
        self._drop_live()
        disk, digest, partial = self._client.job.disk, wanted.digest, wanted.partial
        try:
            with (
                contextlib.closing(GatherPool(stop)) as pool,
                self._begun(pool, "copy", plan, digest, hosts, target, disk, partial),
            ):
                pass
        except BaseException:
            self._drop_live()
            raise

    @contextlib.contextmanager
    def _begun(
        self,
        pool: GatherPool,
        kind: str,
        plan: PiecePlan,
        digest: str,
        hosts: list[str],
        target: str,
        disk: Disk,
        partial: Mapping[str, PartialFile],
    ) -> Iterator[Gather]:
        """Get pieces while the block lasts; its end waits for all of them, and an error in it gives them up."""
        self._listen_again()
        names, path = [file.name for file in plan.files], f"{kind}/{key_of(digest)}"
        live = LivePieces(self._shelf.directory, kind, digest, target, names, len(plan.pieces))
        self._live.append(live)
        together = Together(hosts, self.address, self._tokens() or "", path)
        gather = self._gathers[path] = Gather(plan, together, disk, target, live, partial)
        self._report(
            "debug", "peers_started", kind=kind, hosts=len(hosts), pieces=len(plan.pieces), bytes=plan.size
        )
        with pool.running(gather) as running:
            yield gather
            self._count(running.result())

    def _count(self, tally: Tally) -> None:
        self._add(origin=tally.origin, peers=tally.peers)
        self._rate.note(tally.read, tally.reading)
        if tally.removed:
            self._report("warning", "peers_removed", hosts=dict(tally.removed), wrong=tally.wrong)
        self._is_over_budget = tally.is_over_budget
        if tally.is_over_budget:
            self._report(
                "warning", "origin_budget_exceeded", read=tally.origin, share=tally.share, moved=tally.moved
            )
        self._report("debug", "peers_ended", origin=tally.origin, peers=tally.peers, seconds=tally.seconds)
        self._describe()

    # --- this host ----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Listen, unless another process of this host does already."""
        if self._server is None:
            server = bind_or_none(
                lambda: PieceServer(self._host, self._port, self._shelf, self._tokens, self._getting)
            )
            if server is not None:
                server.start()
            self._server = server

    def _listen_again(self) -> None:
        """Listen where the process that did has ended; if that fails now, other hosts do without this one."""
        try:
            self._listen()
        except ConfigError as error:
            self._report("warning", "peers_not_listening", reason=str(error))

    def _own_address(self) -> str:
        port = self._server.server_port if self._server else self._port
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    def _getting(self, kind: str, digest: str) -> Gather | None:
        return self._gathers.get(f"{kind}/{digest}")

    def _drop_live(self) -> None:
        self._gathers = {}
        for live in self._live:
            live.close()
        self._live = []

    def _describe(self) -> None:
        with contextlib.suppress(SyncdError, OSError):
            read = ReadBytes(self._bytes["origin"], self._bytes["peers"], self._is_over_budget)
            self._client.describe({INFO: self.address, READ: read.document()}, now=False)


class _CachedToken:
    """The job's token, read again every few seconds: each request of another host asks for it."""

    def __init__(self, read: Callable[[], str | None]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._token: str | None = None
        self._until = 0.0

    def __call__(self) -> str | None:
        with self._lock:
            if time.monotonic() >= self._until:
                self._until = time.monotonic() + 2.0
                with contextlib.suppress(OSError):  # else others would blame this host for its file system
                    self._token = self._read()
            return self._token
