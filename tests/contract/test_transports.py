"""The contract that every transport keeps, at both of its ends."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch", reason="the trainer's end needs torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from support.checker import marker, sealed  # noqa: E402
from support.jobs import start  # noqa: E402

from syncd.errors import ConfigError, CorruptDataError, NonFiniteError, RefusedError, SyncdError  # noqa: E402
from syncd.jobfile.sections import SyncSection, sync_methods  # noqa: E402
from syncd.protocol.layout import Job, parse_attempt_name  # noqa: E402
from syncd.protocol.local_disk import SystemClock  # noqa: E402
from syncd.protocol.manifest import damaged_files, missing_files, read_manifest  # noqa: E402
from syncd.protocol.memory import hold_copy  # noqa: E402
from syncd.protocol.presence import RunningStatus  # noqa: E402
from syncd.protocol.probe import Probe  # noqa: E402
from syncd.protocol.receipt import read_receipts  # noqa: E402
from syncd.synchronizer import Synchronizer  # noqa: E402
from syncd.transports.base import (  # noqa: E402
    FILES,
    ReceiveContext,
    SendContext,
    Sent,
    StepContent,
    WeightDirectory,
    WeightReceiver,
    WeightSender,
    WeightTensors,
    close_senders,
    find_transport,
    open_senders,
)
from syncd.transports.files.directory import DirectoryOptions, Verification  # noqa: E402
from syncd.transports.files.receive import FilesReceiver  # noqa: E402
from syncd.transports.files.stage import HostStage  # noqa: E402
from syncd.transports.ranks import Ranks  # noqa: E402

LONG = 60.0
TRANSPORTS = (FILES, "memory", "nccl")
STORED = (FILES, "memory")
"""Transports whose receiver reads bytes that stay somewhere."""

MODES = ("background", "stream")

WEIGHTS = {
    "large": torch.arange(1 << 16, dtype=torch.float32).reshape(256, 256),
    "half": torch.linspace(-3, 3, 1000).to(torch.bfloat16),
    "bytes": torch.arange(13, dtype=torch.uint8),
    "eight": torch.linspace(-2, 2, 24).reshape(2, 3, 4).to(torch.float8_e4m3fn),
    "integers": torch.arange(-5, 5),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
}


def weights(step=0):
    """Return the weights of a step: no tensor of two steps is the same."""
    return {name: (tensor.double() + step).to(tensor.dtype) for name, tensor in WEIGHTS.items()}


def export_of(tensors):
    """Return an export that makes one tensor after the other."""
    return lambda: iter(tensors.items())


class ThreadRanks:
    """The ranks of a trainer as threads of this process."""

    def __init__(self, world_size):
        self.world_size, self._boxes = world_size, [None] * world_size
        self._barrier = threading.Barrier(world_size, timeout=LONG)
        self._local = threading.local()

    @property
    def rank(self):
        return self._local.rank

    def run(self, work):
        """Do something on all ranks at once; return what each returned or raised."""
        found = [None] * self.world_size

        def one(rank):
            self._local.rank = rank
            try:
                found[rank] = work()
            except BaseException as error:  # noqa: BLE001 - looked at by the test
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        return found

    def gather(self, value):
        self._boxes[self.rank] = value
        self._barrier.wait()
        found = list(self._boxes)
        self._barrier.wait()
        return found

    def broadcast(self, value):
        return self.gather(value)[0]

    def close(self):
        pass


class Bed:
    """A job with a daemon, the trainer's end of one transport, and an explorer's end of it."""

    def __init__(self, name, root, memory, *, mode="background", ranks=None, **settings):
        os.mkdir(root)
        self.name, self.job = name, Job.at(str(root))
        self._stack = contextlib.ExitStack()
        self.daemon, _, _ = start(self.job, SystemClock(), rewind_settle=0.0, trash_grace=0.0)
        self._stack.callback(self.daemon.close)
        self.trainer = self._stack.enter_context(Synchronizer.open(self.job.root, "trainer"))
        self.explorer = self._stack.enter_context(Synchronizer.open(self.job.root, "explorer", "e0"))
        self.ranks = ranks or Ranks()
        given = {"method": name, "dtype": "keep", "memory_dir": memory, "save_timeout": LONG, "mode": mode}
        self.settings = SyncSection.model_validate(given | settings)
        self.receiver = find_transport(name).open_receiver(
            ReceiveContext(self.explorer, lambda: False, weights())
        )
        self._stack.callback(self.receiver.close)
        self.senders = {}

    def open_sender(self, tied=()):
        """Open the trainer's end on this rank, and return it."""
        client = self.trainer if self.ranks.world_size == 1 or self.ranks.rank == 0 else None
        context = SendContext(self.job, self.ranks, self.settings, client, tied)
        senders = open_senders([self.name], context)
        if client is not None:
            self.senders = senders
        self._stack.callback(close_senders, senders.values()) if self.ranks.world_size == 1 else None
        return senders[self.name]

    def send(self, sender, step, tensors=None, probe=None):
        """Send a step, and wait until it is announced."""
        tensors = weights(step) if tensors is None else tensors
        content = StepContent(export_of(tensors), {"config.json": b"{}"}, probe)
        sender.send(step, f"save-{step}", content)
        sender.wait()

    def announced(self):
        """Have the daemon publish what is announced, and return the newest version."""
        self.daemon.tick(woken=True)
        return self.explorer.latest_version()

    def received(self):
        """Return the tensors that the explorer receives of the newest version, None if it is to use files."""
        found = self.receiver.receive(self.announced(), LONG)
        if not isinstance(found, WeightDirectory):
            return found and dict(found.tensors)
        tensors = {}
        for shard in found.shards:
            tensors |= load_file(f"{found.path}/{shard.name}")
        return tensors

    def received_probe(self):
        """Return the probe that the explorer receives with the newest version."""
        return self.receiver.receive(self.announced(), LONG).probe

    def is_whole(self, step):
        """Return whether a step is announced, and every byte of it is as its manifest says."""
        disk, path = self.job.disk, self.job.step(step)
        manifest = read_manifest(disk, path)
        wrong = missing_files(disk, path, manifest) or damaged_files(disk, path, manifest)
        return not wrong and marker(self.job.root) == step

    def leftovers(self):
        """Return the attempts in the job directory that are no step."""
        names = [entry.name for entry in self.job.disk.list(self.job.root)]
        return [name for name in names if parse_attempt_name(name) is not None]

    def payload(self):
        """Return the directory that the transport's receiver reads the newest step from."""
        step = self.announced().step
        if self.name != "memory":
            return f"{self.job.step(step)}/actor"
        manifest = read_manifest(self.job.disk, self.job.step(step))
        held = hold_copy(self.senders[self.name]._copies.memory_directory, manifest)
        held.close()
        return f"{held.path}/actor"

    def close(self):
        self._stack.close()


class BroadcastBed(Bed):
    """Its explorer waits in a thread while a step is sent."""

    PATIENCE = 3.0

    def __init__(self, *given, **settings):
        super().__init__(*given, ready_timeout=self.PATIENCE, broadcast_timeout=LONG, **settings)
        self.tensors, self.probe, self._step = None, None, -1

    def send(self, sender, step, tensors=None, probe=None):
        if self.ranks.world_size > 1 and self.ranks.rank != 0:
            return super().send(sender, step, tensors, probe)
        explorer = threading.Thread(target=self._receive)
        explorer.start()
        self.trainer.wait_for(self._explorer_asks, LONG)
        try:
            return super().send(sender, step, tensors, probe)
        finally:
            explorer.join(LONG)

    def _explorer_asks(self):
        living = self.trainer.explorers.living().values()
        return any(one.status is RunningStatus.REQUIRE_SYNC for one in living)

    def _receive(self):
        came = self.receiver.wait(self._step, self.PATIENCE)
        if isinstance(came, WeightTensors):
            self.tensors, self._step = {name: one.clone() for name, one in came.tensors.items()}, came.step
            self.probe = came.probe

    def received(self):
        return super().received() if self.tensors is None else self.tensors

    def received_probe(self):
        return self.probe


def open_bed(name, *given, **settings):
    """Return the bed of a transport."""
    return (BroadcastBed if name == "nccl" else Bed)(name, *given, **settings)


@pytest.fixture(
    params=[name if name in STORED else pytest.param(name, marks=pytest.mark.slow) for name in TRANSPORTS]
)
def bed(request, tmp_path, shm):
    made = open_bed(request.param, tmp_path / "job", shm)
    yield made
    made.close()


def same(found, sent):
    """Return whether two sets of tensors have the same names, shapes, dtypes and bytes."""
    if found is None or found.keys() != sent.keys():
        return False
    pairs = [(found[name], sent[name]) for name in sent]
    return all(
        (one.dtype, one.shape) == (other.dtype, other.shape)
        and one.reshape(-1).view(torch.uint8).equal(other.contiguous().reshape(-1).view(torch.uint8))
        for one, other in pairs
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_bytes_names_shapes_and_dtypes_arrive(name, mode, tmp_path, shm):
    with contextlib.closing(open_bed(name, tmp_path / "job", shm, mode=mode)) as bed:
        sender = bed.open_sender()
        sender.prepare(export_of(weights()))
        sender.prepare(export_of(weights()))
        for step in (1, 2, 3):
            bed.send(sender, step)
            assert bed.is_whole(step)
            assert same(bed.received(), weights(step))


def test_floating_point_tensors_are_cast_as_the_job_file_says(tmp_path, shm):
    for name in TRANSPORTS:
        with contextlib.closing(open_bed(name, tmp_path / name, shm, dtype="bfloat16")) as bed:
            bed.send(bed.open_sender(), 1)
            found = bed.received()
            assert {found[one].dtype for one in ("large", "half", "scalar")} == {torch.bfloat16}
            assert (found["integers"].dtype, found["eight"].dtype) == (torch.int64, torch.float8_e4m3fn)


def test_a_tied_tensor_is_not_sent(bed):
    tensors = weights(1)
    bed.send(bed.open_sender(tied=("head",)), 1, tensors | {"head": tensors["large"]})
    assert same(bed.received(), tensors)


def test_a_step_has_the_files_beside_its_weights(bed):
    bed.send(bed.open_sender(), 1)
    with open(f"{bed.payload()}/config.json", "rb") as file:
        assert file.read() == b"{}"


PROBE = Probe(((5, 6, 7), (1, 0)), ((-0.5, -2.25), (-11.0,)), "float32", "bfloat16")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*TRANSPORTS, "pigeon"])
@pytest.mark.usefixtures("pigeon")
def test_a_probe_arrives_with_the_weights(name, mode, tmp_path, shm):
    """The receiver has it with the tensors or the directory, and the manifest has it; other steps have none."""
    with contextlib.closing(open_bed(name, tmp_path / "job", shm, mode=mode)) as bed:
        sender = bed.open_sender()
        for step, probe in ((1, PROBE), (2, None), (3, PROBE)):
            bed.send(sender, step, probe=probe)
            assert same(bed.received(), weights(step))
            assert bed.received_probe() == probe
            assert read_manifest(bed.job.disk, bed.job.step(step)).probe == probe


def test_a_probe_arrives_through_a_stage_for_a_running_engine_and_with_a_uri(tmp_path, shm):
    """However a version is found: in the job's files, staged, unchecked, unverified, or elsewhere."""
    with contextlib.closing(open_bed(FILES, tmp_path / "job", shm)) as bed:
        bed.send(bed.open_sender(), 1, probe=PROBE)
        stage = HostStage(str(tmp_path / "stage"), bed.job.root)
        receivers = [
            FilesReceiver(bed.explorer, DirectoryOptions(), stage),
            FilesReceiver(bed.explorer, DirectoryOptions(verify=Verification.SIZE)),
        ]
        for receiver in receivers:
            assert receiver.receive(bed.announced(), LONG).probe == PROBE
            with bed.explorer.lease(bed.announced()) as leased:
                assert receiver.find_unchecked(leased).directory.probe == PROBE
            receiver.close()
        for number, uri, kind in ((2, "tinker://run/2", "remote"), (3, str(tmp_path), "weights")):
            save_file(weights(), tmp_path / "model.safetensors")
            bed.trainer.publish(uri, number, probe=PROBE)
            options = DirectoryOptions(kinds=frozenset({kind}))
            with contextlib.closing(FilesReceiver(bed.explorer, options)) as receiver:
                assert receiver.receive(bed.announced(), LONG).probe == PROBE


@pytest.mark.parametrize("name", TRANSPORTS)
def test_two_ranks_send_one_probe(name, tmp_path, shm):
    with contextlib.closing(open_bed(name, tmp_path / "job", shm, ranks=ThreadRanks(2))) as bed:

        def work():
            with contextlib.closing(bed.open_sender()) as sender:
                bed.send(sender, 1, probe=PROBE)
                found = bed.received_probe() if bed.ranks.rank == 0 else None
                bed.ranks.gather(None)
                return found

        assert bed.ranks.run(work) == [PROBE, None]
        receipts = read_receipts(bed.job.disk, bed.job.step(1))
        assert [one.probe for one in receipts] == [PROBE, None]


def test_sent_returns_the_result_of_the_last_send(bed):
    sender = bed.open_sender()
    assert sender.sent is None
    bed.send(sender, 1)
    size = sum(tensor.nbytes for tensor in WEIGHTS.values())
    is_received = bed.name == "nccl"
    assert sender.sent == Sent(bed.name, 1, size, sender.sent.seconds, True, is_received)
    assert sender.sent.seconds > 0


def test_wait_returns_at_once_if_no_send_is_in_flight(bed):
    sender = bed.open_sender()
    sender.wait()
    bed.send(sender, 1)
    sender.wait()
    sender.wait()
    assert same(bed.received(), weights(1))


def test_non_finite_weights_are_refused_and_leave_no_partial_step(bed):
    sender = bed.open_sender()
    bed.send(sender, 1)
    with pytest.raises(NonFiniteError):
        bed.send(sender, 2, weights(2) | {"scalar": torch.tensor(float("nan"))})
    assert sender.sent is None
    assert (sealed(bed.job.root), bed.leftovers()) == ([1], [])
    assert same(bed.received(), weights(1))
    bed.send(sender, 3)
    assert same(bed.received(), weights(3))


def test_an_export_that_fails_leaves_no_partial_step(bed):
    def breaks_off():
        yield from list(weights(2).items())[:2]
        raise ValueError("out of memory")

    sender = bed.open_sender()
    bed.send(sender, 1)
    with pytest.raises(SyncdError, match="out of memory"):
        sender.send(2, "save-2", StepContent(breaks_off))
    assert (sealed(bed.job.root), bed.leftovers()) == ([1], [])
    sender.wait()
    bed.send(sender, 3)
    assert same(bed.received(), weights(3))


@pytest.mark.parametrize("name", TRANSPORTS)
def test_two_ranks_send_one_step(name, tmp_path, shm):
    with contextlib.closing(open_bed(name, tmp_path / "job", shm, ranks=ThreadRanks(2))) as bed:

        def work():
            with contextlib.closing(bed.open_sender()) as sender:
                bed.send(sender, 1)
                return bed.received() if bed.ranks.rank == 0 and bed.ranks.gather(0) else bed.ranks.gather(0)

        found, other = bed.ranks.run(work)
        assert other == [0, 0]
        assert same(found, weights(1))


@pytest.mark.parametrize("name", TRANSPORTS)
def test_if_one_rank_fails_all_raise_and_no_partial_step_is_left(name, tmp_path, shm):
    with contextlib.closing(open_bed(name, tmp_path / "job", shm, ranks=ThreadRanks(2))) as bed:

        def work():
            with contextlib.closing(bed.open_sender()) as sender:
                files = {} if bed.ranks.rank == 0 else {"config.json": b"{}"}
                tensors = weights(1)
                if bed.ranks.rank == 1:
                    tensors["half"] = tensors["half"] * float("inf")
                sender.send(1, "save-1", StepContent(export_of(tensors), files))
                sender.wait()

        errors = bed.ranks.run(work)
        assert [isinstance(error, SyncdError) for error in errors] == [True, True], errors
        assert str(errors[0]) == str(errors[1])
        assert (sealed(bed.job.root), bed.leftovers()) == ([], [])


@pytest.mark.parametrize("bed", STORED, indirect=True)
def test_damaged_bytes_are_never_received(bed):
    bed.send(bed.open_sender(), 1)
    payload = bed.payload()
    shard = next(name for name in os.listdir(payload) if name.endswith(".safetensors"))
    with open(f"{payload}/{shard}", "r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"\xff")
    if bed.name == FILES:
        with pytest.raises(RefusedError, match="digest"):
            bed.received()
    else:
        assert bed.received() is None, "the files have it"


def test_a_receiver_returns_none_for_a_step_sent_through_files_only(bed):
    """The step of a trainer that sends through files alone is no step of any other transport."""
    context = SendContext(bed.job, bed.ranks, bed.settings)
    with contextlib.closing(open_senders([], context)[FILES]) as files:
        bed.send(files, 1)
    found = bed.received()
    assert same(found, weights(1)) if bed.name == FILES else found is None


def test_close_finishes_the_save_in_flight_and_is_idempotent(bed):
    sender = bed.open_sender()
    sender.send(1, "save-1", StepContent(export_of(weights(1))))
    sender.close()
    sender.close()
    assert bed.is_whole(1)
    bed.receiver.close()
    bed.receiver.close()


def test_a_receiver_may_join_and_leave_at_any_time(bed):
    receiver = bed.receiver
    for call in (receiver.join, receiver.join, receiver.leave, receiver.leave, receiver.join):
        call()
    bed.send(bed.open_sender(), 1)
    assert same(bed.received(), weights(1))


def test_unavailable_returns_the_reason(bed, tmp_path):
    sender = bed.open_sender()
    assert sender.unavailable() == ""
    bed.explorer.close()
    reasons = {FILES: "", "memory": "no explorer is on this host", "nccl": "no explorer takes part"}
    assert sender.unavailable() == reasons[bed.name]


def test_a_memory_directory_on_disk_is_unavailable_and_sends_through_files(tmp_path, shm):
    with contextlib.closing(Bed("memory", tmp_path / "job", "/proc")) as bed:
        sender = bed.open_sender()
        assert sender.unavailable() == "no copies can be made"
        bed.send(sender, 1)
        assert (sender.sent.is_done, sealed(bed.job.root)) == (False, [1])


PIGEON = """
from syncd.transports.base import Transport
from syncd.transports.files.send import FilesSender
from syncd.transports.files.receive import FilesReceiver

class PigeonSender(FilesSender):
    name = "pigeon"

    def send(self, step, attempt, content):
        self.flown = sorted(content.files)
        super().send(step, attempt, content)

class PigeonReceiver(FilesReceiver):
    name = "pigeon"

TRANSPORT = Transport("pigeons:PigeonSender", "pigeons:PigeonReceiver")
WRONG = Transport("pigeons:PigeonReceiver", "nowhere:Nothing")
"""


@pytest.fixture
def pigeon(tmp_path, monkeypatch):
    """Install a package that registers transports."""
    place = tmp_path / "installed"
    (place / "pigeons-1.0.dist-info").mkdir(parents=True)
    (place / "pigeons.py").write_text(PIGEON)
    (place / "pigeons-1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: pigeons\nVersion: 1.0\n"
    )
    (place / "pigeons-1.0.dist-info/entry_points.txt").write_text(
        "[syncd.transports]\npigeon = pigeons:TRANSPORT\nwrong = pigeons:WRONG\n"
        "broken = pigeons:NONE\ntext = pigeons:PIGEON\nclass = pigeons:PigeonSender\n"
    )
    monkeypatch.syspath_prepend(str(place))
    yield
    sys.modules.pop("pigeons", None)


@pytest.mark.usefixtures("pigeon")
def test_a_third_partys_transport_is_found_by_its_entry_point(tmp_path, shm):
    with contextlib.closing(Bed("pigeon", tmp_path / "job", shm)) as bed:
        sender = bed.open_sender()
        assert (type(sender).__name__, sender.name, bed.receiver.name) == ("PigeonSender", "pigeon", "pigeon")
        assert isinstance(sender, WeightSender)
        assert isinstance(bed.receiver, WeightReceiver)
        bed.send(sender, 1)
        assert sender.sent.method == "pigeon"
        assert sender.flown == ["config.json"]
        assert same(bed.received(), weights(1))
    assert sync_methods() == (
        "nccl",
        "checkpoint",
        "memory",
        "auto",
        "broken",
        "class",
        "pigeon",
        "text",
        "wrong",
    )


@pytest.mark.usefixtures("pigeon")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dove", "no transport is called 'dove'"),
        ("broken", "transport broken cannot be imported"),
        ("class", "is not a Transport"),
    ],
)
def test_an_invalid_transport_is_refused(name, text):
    with pytest.raises(ConfigError, match=text) as refused:
        find_transport(name)
    if name == "dove":
        assert "checkpoint" in refused.value.hint
        assert "pigeon" in refused.value.hint


@pytest.mark.usefixtures("pigeon")
def test_an_invalid_sender_or_receiver_is_refused_when_opened():
    wrong = find_transport("wrong")
    with pytest.raises(ConfigError, match="is no WeightSender"):
        wrong.open_sender(None)
    with pytest.raises(ConfigError, match=r"nowhere:Nothing cannot be imported"):
        wrong.open_receiver(None)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pkgutil import resolve_name
from syncd.transports.base import find_transport
for name in ("checkpoint", "memory", "nccl"):
    find_transport(name)
for name in ("checkpoint", "memory"):
    print(resolve_name(find_transport(name).receiver).name)
"""


def test_a_transport_is_found_and_files_are_received_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=LONG, check=False
    )
    assert (done.stdout.split(), done.returncode) == (["checkpoint", "memory"], 0), done.stderr


def test_non_finite_errors_are_corrupt_data_errors():
    assert issubclass(NonFiniteError, CorruptDataError)
