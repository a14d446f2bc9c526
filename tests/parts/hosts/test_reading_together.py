"""Hosts read a version together: the right bytes, one copy from the file system, whatever one of them does."""

import os
import threading
import time
from collections import Counter
from contextlib import closing
from http import HTTPStatus

import pytest
from support.deltas import contents

from syncd.errors import ConfigError, StorageError
from syncd.parts.hosts import asking, reader, server
from syncd.parts.hosts.blame import STRIKES
from syncd.parts.hosts.gather import Gather
from syncd.parts.hosts.gather_pool import AT_ONCE
from syncd.parts.hosts.shelf import LivePieces, Shelf

NOBODY = "127.0.0.1:9"
"""Nobody listens there."""


def right(fleet, hosts, step):
    wanted = contents(fleet.place / f"export{step}")
    return all(contents(host.held.directory.path) == wanted for host in hosts)


def copies(fleet, hosts, step):
    """Return the bytes that hosts have read from the file system, over those of the weights."""
    shards = [f"{fleet.place}/export{step}/{name}" for name in os.listdir(fleet.place / f"export{step}")]
    size = sum(os.path.getsize(path) for path in shards if path.endswith(".safetensors"))
    return sum(host.reader.bytes_by_source()["origin"] for host in hosts) / size


def test_three_hosts_read_a_step_once_from_the_file_system(fleet):
    fleet.whole(1)
    hosts = fleet.add(3)
    fleet.list()
    fleet.fetch_all()
    assert right(fleet, hosts, 1)
    assert copies(fleet, hosts, 1) < 1.01
    assert not any(host.disk.ahead_bytes for host in hosts)
    assert {host.held.shown_source for host in hosts} == {"peers"}
    assert not any("origin_budget_exceeded" in host.events() for host in hosts)


def test_a_host_that_comes_later_reads_nothing_from_the_file_system(fleet):
    fleet.whole(1)
    first, late = fleet.add(2)
    fleet.list([first])
    first.fetch()
    late.fetch()
    assert right(fleet, [late], 1)
    assert late.reader.bytes_by_source()["origin"] == 0


def test_changes_are_read_together_and_each_host_makes_the_version_of_them(fleet):
    fleet.whole(1)
    hosts = fleet.add(3)
    fleet.list()
    fleet.fetch_all()
    fleet.delta(2)
    before = sum(host.disk.read_bytes for host in hosts)
    fleet.fetch_all()
    assert right(fleet, hosts, 2)
    peers = sum(host.reader.bytes_by_source()["peers"] for host in hosts)
    container = os.path.getsize(f"{fleet.job.step(2)}/actor/delta-00001-of-00001.safetensors")
    read = sum(host.disk.read_bytes for host in hosts) - before
    assert peers
    assert read < 3 * container + 3 * 6 * (64 << 10)  # heads of files are read several times


def test_a_host_that_joins_at_a_delta_gets_the_whole_version_from_another(fleet):
    fleet.whole(1)
    (first,) = fleet.add(1)
    fleet.list()
    first.fetch()
    fleet.delta(2)
    first.fetch()
    (late,) = fleet.add(1)
    late.fetch()
    assert right(fleet, [late], 2)
    assert late.reader.bytes_by_source()["origin"] == 0


def test_hosts_that_all_begin_at_a_delta_read_its_keyframe_together(fleet):
    fleet.whole(1)
    fleet.delta(2)
    hosts = fleet.add(3)
    fleet.list()
    fleet.fetch_all()
    assert right(fleet, hosts, 2)
    assert copies(fleet, hosts, 2) < 1.7  # and the changes


def test_pieces_of_a_host_that_is_gone_are_read_by_the_next_in_order(fleet):
    fleet.whole(1)
    hosts = fleet.add(3)
    fleet.list(more=[NOBODY])
    fleet.fetch_all()
    assert right(fleet, hosts, 1)
    assert copies(fleet, hosts, 1) < 1.6
    removed = [fields["hosts"] for host in hosts for name, fields in host.told if name == "peers_removed"]
    assert {NOBODY: "refused"} in removed


def test_a_host_alone_in_a_list_of_dead_ones_reads_everything_and_says_so(fleet):
    fleet.whole(1)
    (host,) = fleet.add(1)
    fleet.list(more=["127.0.0.1:8", NOBODY])
    host.fetch()
    assert right(fleet, [host], 1)
    assert host.held.shown_source == "stage"
    assert "origin_budget_exceeded" in host.events()
    assert host.client.own(None, "test").info["read"]["over_budget"]


def test_wrong_bytes_are_never_kept_and_their_host_is_asked_nothing_more(fleet, monkeypatch):
    fleet.whole(1)
    hosts = fleet.add(3)
    fleet.list()
    liar, honest = hosts[0].reader._server, server.PieceHandler._send

    def send(handler, holding, file, offset, length):
        if handler.server is not liar:
            honest(handler, holding, file, offset, length)
            return
        handler._answer(HTTPStatus.OK, length)
        handler.wfile.write(os.urandom(length))

    monkeypatch.setattr(server.PieceHandler, "_send", send)
    fleet.fetch_all()
    assert right(fleet, hosts, 1)
    for host in hosts[1:]:
        (removed,) = [fields for name, fields in host.told if name == "peers_removed"]
        assert removed["hosts"] == {hosts[0].reader.address: "wrong"}


def test_hosts_with_other_tokens_give_each_other_nothing_and_read_alone(fleet, monkeypatch):
    fleet.whole(1)
    hosts = fleet.add(2)
    fleet.list()
    for number, host in enumerate(hosts):
        host.reader._tokens._read = lambda number=number: f"{number:064x}"
    fleet.fetch_all()
    assert right(fleet, hosts, 1)
    assert all(host.reader.bytes_by_source()["peers"] == 0 for host in hosts)


def test_hosts_with_different_lists_get_the_right_bytes(fleet, monkeypatch):
    fleet.whole(1)
    hosts = fleet.add(3)
    fleet.list()
    lists = {
        host.client.job: sorted(other.reader.address for other in hosts if other is not host)
        for host in hosts
    }
    monkeypatch.setattr(reader, "read_members", lambda job: lists[job])
    fleet.fetch_all()
    assert right(fleet, hosts, 1)


def test_a_host_that_does_not_answer_is_given_up(fleet, monkeypatch):
    monkeypatch.setattr(asking, "SILENT", 0.2)
    monkeypatch.setattr(asking.HostRequest.__init__, "__defaults__", (1.0, 0.2))
    fleet.whole(1)
    hosts = fleet.add(2)
    fleet.list()
    mute = hosts[0].reader._server
    honest = server.PieceHandler._piece
    ended = threading.Event()

    def piece(handler, *place):
        if handler.server is mute:
            ended.wait(5)
        else:
            honest(handler, *place)

    monkeypatch.setattr(server.PieceHandler, "_piece", piece)
    fleet.fetch_all([hosts[1]])
    ended.set()
    assert right(fleet, [hosts[1]], 1)
    assert STRIKES == 3


def test_a_step_without_tiles_is_passed_on_file_by_file(fleet):
    fleet.whole(1)
    for name in os.listdir(f"{fleet.job.step(1)}/actor/.receipts"):
        if name.endswith(".tiles"):
            os.unlink(f"{fleet.job.step(1)}/actor/.receipts/{name}")
    hosts = fleet.add(3)
    fleet.list()
    fleet.fetch_all()
    assert right(fleet, hosts, 1)
    assert copies(fleet, hosts, 1) < 1.1


def test_reading_alone_is_chosen_where_it_was_quick(fleet):
    fleet.whole(1)
    hosts = fleet.add(2)
    fleet.list()
    for host in hosts:
        host.reader._is_auto = True
        host.reader._rate.note(10**12, 1.0)
    fleet.fetch_all()
    assert right(fleet, hosts, 1)
    assert all(host.reader.bytes_by_source()["peers"] == 0 for host in hosts)


def test_without_a_list_a_host_reads_as_it_always_did(fleet):
    fleet.whole(1)
    (host,) = fleet.add(1)
    host.fetch()
    assert right(fleet, [host], 1)
    assert "peers_started" not in host.events()


def test_a_second_follower_of_a_host_shares_the_port_of_the_first(fleet):
    fleet.whole(1)
    (first,) = fleet.add(1)
    (second,) = fleet.add(1, peers=first.reader.address)
    assert second.reader._server is None
    assert "peers_address_shared" in second.events()
    assert second.reader.address == first.reader.address
    fleet.list()
    fleet.fetch_all()
    assert right(fleet, [first, second], 1)


@pytest.mark.parametrize("address", ["nowhere", "host:99999", "0.0.0.0:7410", "[::]:7410", "a b:7"])
def test_an_address_that_others_cannot_ask_is_refused(fleet, address):
    with pytest.raises(ConfigError) as error:
        fleet.add(1, peers=address)
    assert "--peers HOST:PORT" in error.value.hint


def test_a_follower_that_cannot_listen_when_its_turn_comes_goes_on(fleet):
    fleet.whole(1)
    (first,) = fleet.add(1)
    (second,) = fleet.add(1, peers=first.reader.address)
    fleet.list([first])
    first.reader.close()
    second.reader._host = "192.0.2.1"  # this host has that address no longer
    second.fetch()
    assert right(fleet, [second], 1)
    assert "peers_not_listening" in second.events()


def test_hosts_that_have_no_room_for_more_connections_are_not_removed(fleet, monkeypatch):
    monkeypatch.setattr(server.PieceServer, "most_connections", 3)
    full, answer, process = [], server.PieceHandler._send, server.PieceServer.process_request

    def answer_slowly(handler, *piece):
        time.sleep(0.05)
        answer(handler, *piece)

    def note_full(server, *request):
        full.append(len(server._open) >= 3)
        process(server, *request)

    monkeypatch.setattr(server.PieceHandler, "_send", answer_slowly)
    monkeypatch.setattr(server.PieceServer, "process_request", note_full)
    fleet.whole(1)
    hosts = fleet.add(6)
    fleet.list()
    fleet.fetch_all()
    assert right(fleet, hosts, 1)
    assert any(full)
    removed = [fields["hosts"] for host in hosts for name, fields in host.told if name == "peers_removed"]
    assert not any("lost" in why.values() for why in removed)


def test_what_another_follower_of_the_host_gets_is_given_by_the_one_that_listens(fleet):
    fleet.whole(1)
    (first,) = fleet.add(1)
    (second,) = fleet.add(1, peers=first.reader.address)
    second.fetcher._stage = first.fetcher._stage
    second.fetcher._files._stage = first.fetcher._stage  # followers of one host share its stage
    second.reader._shelf.directory = first.reader._shelf.directory
    (other,) = fleet.add(1)
    fleet.list()
    fleet.fetch_all([second, other])
    assert right(fleet, [second, other], 1)
    assert copies(fleet, [second, other], 1) < 1.1


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_copy_is_not_built_upon_and_the_version_is_right(fleet, damaged):
    """Also where no host has a copy that is not damaged."""
    fleet.whole(1)
    hosts = fleet.add(2)
    fleet.list()
    fleet.fetch_all()
    for host in hosts[:damaged]:
        with open(f"{host.held.directory.path}/model-00001-of-00002.safetensors", "r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(bytes(100))
    fleet.delta(2)
    fleet.fetch_all()
    assert right(fleet, hosts, 2)
    assert all("stage_copy_damaged" in host.events() for host in hosts[:damaged])


def test_several_deltas_at_once_are_read_together(fleet):
    fleet.whole(1)
    hosts = fleet.add(2)
    fleet.list()
    fleet.fetch_all()
    fleet.delta(2)
    fleet.delta(3)
    fleet.fetch_all()
    assert right(fleet, hosts, 3)
    assert {host.held.shown_source for host in hosts} == {"peers"}


def test_what_a_killed_follower_leaves_in_the_stage_is_removed(fleet):
    fleet.whole(1)
    (host,) = fleet.add(1)
    own = host.fetcher._stage.directory
    for name in ("live-copy-0123456789abcdef", "live-containers-0123456789abcdef"):
        with open(f"{own}/{name}", "w") as file:
            file.write("{}")
    os.mkdir(f"{own}/containers-0123456789abcdef")
    host.fetcher.sweep()
    assert [name for name in os.listdir(own) if "0123456789abcdef" in name] == []


@pytest.mark.parametrize("allowed", [0, 2, 5])
def test_a_host_that_has_no_more_threads_gives_the_version_up_and_gets_it_later(fleet, monkeypatch, allowed):
    fleet.whole(1)
    host, other = fleet.add(2)
    fleet.list()
    fleet.fetch_all()
    fleet.delta(2)
    started, start = [], threading.Thread.start

    def start_few(thread):
        started.append(thread.name == "pieces")
        if started[-1] and sum(started) > allowed:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_few)
        host.try_fetch()
    assert isinstance(host.error, StorageError)
    host.error = None
    fleet.fetch_all()
    assert right(fleet, [host, other], 2)


def test_of_a_long_chain_a_few_deltas_are_read_at_once(fleet, monkeypatch):
    fleet.whole(1)
    hosts = fleet.add(2)
    fleet.list()
    fleet.fetch_all()
    for step in range(2, 9):
        fleet.delta(step)
        if step == 4:
            hosts[1].fetch()  # each begins at another step then
    running, most, counting, run = Counter(), [], threading.Lock(), Gather.run

    def run_counted(gather, stop):
        me = gather._together.me
        with counting:
            running[me] += 1
            most.append(running[me])
        time.sleep(0.1)
        try:
            return run(gather, stop)
        finally:
            with counting:
                running[me] -= 1

    monkeypatch.setattr(Gather, "run", run_counted)
    fleet.fetch_all()
    assert right(fleet, hosts, 8)
    assert len(most) == 7 + 4
    assert max(most) <= AT_ONCE


def test_a_gather_that_cannot_be_shown_leaves_no_lock(tmp_path):
    (tmp_path / "live-copy-7.new").mkdir()  # a stage without room refuses the file too
    with pytest.raises(OSError, match="directory"):
        LivePieces(str(tmp_path), "copy", "7", str(tmp_path), ["a"], 3)
    (tmp_path / "live-copy-7.new").rmdir()
    with closing(LivePieces(str(tmp_path), "copy", "7", str(tmp_path), ["a"], 3)):
        assert Shelf(str(tmp_path)).find("copy", "7") is not None


def test_a_record_that_is_nested_too_deeply_shows_no_gather(tmp_path):
    (tmp_path / "live-copy-7").write_text("[" * 100_000)
    assert Shelf(str(tmp_path)).find("copy", "7") is None
