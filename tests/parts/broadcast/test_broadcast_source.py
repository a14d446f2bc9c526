"""What becomes of weights that a broadcast has brought before they are published, and of what they made."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from safetensors.torch import save  # noqa: E402
from support.followers import Scene  # noqa: E402
from support.tied_qwen import log_probs, tiny  # noqa: E402

from explorer_hooks.hook import Unproven, UntouchedError  # noqa: E402
from explorer_hooks.hooks.transformers import TransformersHook  # noqa: E402
from explorer_hooks.parts.broadcast import source  # noqa: E402
from explorer_hooks.parts.broadcast.source import BroadcastSource  # noqa: E402
from explorer_hooks.run.weight_sources import WeightSource  # noqa: E402
from syncd.client.broadcast_control import BroadcastControl  # noqa: E402
from syncd.errors import LoadFailedError  # noqa: E402
from syncd.parts.broadcast.receive import BroadcastReceiver  # noqa: E402
from syncd.protocol.broadcast_round import COMMITTED, Round  # noqa: E402
from syncd.protocol.engine_state import EngineState  # noqa: E402
from syncd.protocol.probe import Probe  # noqa: E402
from syncd.protocol.writer import StepWriter  # noqa: E402
from syncd.synchronizer import Synchronizer  # noqa: E402
from syncd.transports.base import WeightTensors  # noqa: E402

START = (1, 0)


class Bed:
    """An explorer's source over a daemon that ticks when told, and a trainer that says what it is told to."""

    def __init__(self, place):
        self.scene = Scene(place)
        self.hook = TransformersHook(tiny(0), timeout=5)
        self.follower = self.scene.follow("e0", self.hook, verify="header", retries=1)
        self.trainer = Synchronizer.open(self.scene.root, "trainer")
        self.stopped, self.coming = False, []
        self.receiver = BroadcastReceiver(self.follower.client, self.hook.model.state_dict(keep_vars=True))
        self.receiver.wait = lambda current, timeout: self.coming.pop(0)() if self.coming else None
        self.source = BroadcastSource(
            self.follower,
            self.receiver,
            self.hook,
            patience=60.0,
            ready=1.0,
            stop=lambda: self.stopped,
        )

    def send(self, step, attempt, *, generation=1, probe=None, outcome="applied"):
        """Have a broadcast of a step come, and take part in it."""
        told = Round(step, attempt, generation, 1, "", 1.0, {"e0": 1}, COMMITTED, "sum", probe)
        BroadcastControl(self.trainer).open_round(told)
        self.coming.append(lambda: self.received(told, state(step)))
        assert self.source.update(0.01).kind == outcome
        return told

    def received(self, told, tensors):
        """Return what a round brings, as its receiver does."""
        self.receiver._received = told
        return WeightTensors(told.pair, told.attempt, tensors, told.probe)

    def publish(self, step, attempt, salt=None):
        """Have the files of a step published; their weights are those of its number unless another one is given."""
        tensors = state(step if salt is None else salt)
        writer = StepWriter(self.scene.job, step, 1, attempt)
        writer.begin()
        shard = writer.write("actor/model-00001-of-00001.safetensors", save(tensors), tensors=len(tensors))
        writer.receipt(1, [shard])
        writer.seal()
        writer.announce()
        self.scene.tick()

    def runs(self, number):
        return torch.equal(log_probs(self.hook.model), log_probs(tiny(number)))

    def loads(self):
        """Return how often files were loaded."""
        return self.scene.names().count("version_applied")

    def close(self):
        self.receiver.close()
        self.trainer.close()
        self.scene.close()


def state(number):
    found = tiny(number).state_dict()
    del found["lm_head.weight"]
    return found


@pytest.fixture
def bed(tmp_path):
    made = Bed(tmp_path / "job")
    yield made
    made.close()


def ahead(bed, attempt="a"):
    """Return a bed whose explorer runs step 2 while step 1 is published."""
    bed.publish(1, "first")
    assert bed.source.update(0.0).kind == "applied"
    told = bed.send(2, attempt)
    assert bed.source.runs == bed.source.newest() == (1, 2)
    assert bed.runs(2)
    return told


def test_received_weights_run_at_once_and_their_work_waits_until_published(bed):
    ahead(bed)
    assert bed.source.may_work()
    assert not bed.source.is_published
    assert bed.scene.presence().applied == (1, 1)
    assert bed.source.update(0.0).kind == "nothing"
    bed.publish(2, "a")
    assert bed.source.are_published({(1, 2)})
    assert bed.source.is_published
    assert bed.scene.presence().applied == bed.follower.applied == (1, 2)
    assert "ahead" not in bed.scene.presence().info
    assert bed.source.update(0.0).kind == "nothing"
    assert bed.loads() == 1, "the files of a step that was received are not loaded"


def probe_of(number):
    """Return the probe of a version whose weights are those of a number."""
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    model = tiny(number)
    with torch.no_grad():
        found = torch.log_softmax(model(tokens).logits[:, :-1].float(), -1)
    values = found.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return Probe(tuple(map(tuple, tokens.tolist())), tuple(map(tuple, values.tolist())), "float32", "float32")


def test_received_weights_are_proven_by_the_probe_that_came_with_them(bed):
    bed.send(1, "a", generation=0, probe=probe_of(1))
    assert bed.source.may_work()
    assert bed.follower.running().unproven == {}
    bed.publish(1, "a")
    assert bed.source.are_published({(1, 1)})


@pytest.mark.fault("a broadcast delivers other weights than the trainer's")
def test_received_weights_that_cannot_be_proven_are_replaced_by_the_files(bed):
    bed.publish(1, "first")
    assert bed.source.update(0.0).kind == "applied"
    bed.send(2, "a", probe=probe_of(7))
    assert bed.source.runs == bed.scene.presence().applied == (1, 1), "it is back on the published version"
    assert "ahead" not in bed.scene.presence().info
    assert bed.runs(1)
    (found,) = bed.follower.running().unproven.values()
    assert found == Unproven(failed=1), "work that ran across this is not learnt"
    bed.publish(2, "a")
    assert bed.source.update(0.0).kind == "applied"
    assert bed.source.may_work()
    assert bed.runs(2)
    assert bed.loads() == 3, "the step came through files"


def test_work_that_ends_before_received_weights_are_proven_is_known_to_be_doubtful(bed):
    bed.publish(1, "first")
    assert bed.source.update(0.0).kind == "applied"
    before, seen, load = bed.follower.running(), [], bed.hook.load_received

    def watched(weights, fill):
        load(weights, fill)
        seen.append(bed.follower.running())

    bed.hook.load_received = watched
    bed.send(2, "a", probe=probe_of(2))
    (found,) = seen
    assert found.unproven == {found.label: Unproven(pending=True)}
    assert found.unproven_since(before) == {found.label}
    assert bed.follower.pair_named(found.label) == (1, 2)
    assert bed.follower.running().unproven == {}


@pytest.mark.parametrize(("error", "failed"), [(UntouchedError, 0), (LoadFailedError, 1)])
def test_received_weights_that_an_engine_never_took_leave_no_work_in_doubt(bed, error, failed):
    bed.publish(1, "first")
    assert bed.source.update(0.0).kind == "applied"

    def refuse(weights, fill):
        raise error("no")

    bed.hook.load_received = refuse
    bed.send(2, "a", probe=probe_of(2), outcome="nothing")
    assert sum(one.failed for one in bed.follower.running().unproven.values()) == failed


def test_a_first_broadcast_that_cannot_be_proven_leaves_the_engine_without_work(bed):
    bed.send(1, "a", generation=0, probe=probe_of(7), outcome="nothing")
    assert bed.source.runs is None
    assert not bed.source.may_work()
    assert bed.scene.presence().info["state"] == EngineState.WRONG
    bed.publish(1, "a")
    assert bed.source.update(0.0).kind == "applied"
    assert bed.source.may_work()
    assert bed.runs(1)


def test_a_first_version_by_broadcast_is_applied_without_loading_files(bed):
    bed.send(1, "a", generation=0)
    assert bed.source.runs == (1, 1)
    bed.publish(1, "a")
    assert bed.source.are_published({START, (1, 1)})
    assert bed.follower.applied == (1, 1)
    assert bed.loads() == 0


def test_work_of_earlier_versions_is_released_at_once(bed):
    ahead(bed)
    assert bed.source.are_published({(1, 1)})
    assert not bed.source.is_published


def test_a_stop_ends_the_wait_for_publication(bed):
    ahead(bed)
    bed.stopped = True
    assert not bed.source.are_published({(1, 2)})


def test_another_attempt_of_the_step_is_loaded_and_earlier_work_is_dropped(bed):
    ahead(bed)
    bed.publish(2, "b", salt=7)
    assert not bed.source.are_published({(1, 2)})
    assert bed.runs(7)
    assert bed.source.runs == bed.scene.presence().applied == (1, 2)
    assert bed.source.are_published({(1, 2)})


def test_a_later_step_from_files_replaces_the_received_one(bed):
    ahead(bed)
    bed.publish(3, "c")
    assert not bed.source.are_published({(1, 2)})
    assert bed.runs(3)
    assert bed.source.runs == (1, 3)


def withdrawn(bed, told):
    BroadcastControl(bed.trainer).end_round(told, None)


def gone(bed, told):
    bed.trainer.close()


def began_anew(bed, told):
    bed.trainer.close()
    bed.trainer = Synchronizer.open(bed.scene.root, "trainer")


def overdue(bed, told):
    bed.source._patience = 0.0


@pytest.mark.parametrize("why", [withdrawn, gone, began_anew, overdue])
def test_a_received_step_that_is_never_published_is_rolled_back(bed, monkeypatch, why):
    monkeypatch.setattr(source, "_GONE", 0.05)
    told = ahead(bed)
    why(bed, told)
    assert not bed.source.are_published({(1, 2)})
    assert bed.runs(1)
    assert bed.source.runs == bed.source.newest() == bed.scene.presence().applied == (1, 1)
    assert "ahead" not in bed.scene.presence().info
    assert bed.source.are_published({(1, 1)})


def test_work_of_an_unpublished_first_version_belongs_to_no_version(bed):
    """The start model was overwritten: what the engine makes now is not work of it."""
    told = bed.send(1, "a", generation=0)
    BroadcastControl(bed.trainer).end_round(told, None)
    bed.source.wait_until_published()
    assert bed.source.runs is None
    assert bed.source.newest() is None
    assert not bed.source.are_published({START})


def test_received_weights_that_cannot_be_loaded_fall_back_to_files(bed):
    bed.publish(1, "first")
    assert bed.source.update(0.0).kind == "applied"
    bed.receiver.fill = lambda received: 1 / 0
    told = Round(2, "a", 1, 1, "", 1.0, {"e0": 1}, COMMITTED, "sum")
    bed.coming.append(lambda: bed.received(told, state(2)))
    assert bed.source.update(0.01).kind == "applied"
    assert bed.source.is_published
    assert bed.source.runs == (1, 1), (
        "what is published is loaded again: nobody knows what was half filled in"
    )
    assert bed.runs(1)
    bed.publish(2, "a")
    assert bed.source.update(0.0).kind == "applied"
    assert bed.runs(2)


def test_every_version_from_files_counts_as_published(bed):
    source = WeightSource(bed.follower)
    assert source.newest() is None
    bed.publish(1, "first")
    assert source.update(0.0).kind == "applied"
    assert source.runs == source.newest() == (1, 1)
    assert source.is_published
    source.wait_until_published()
    assert source.are_published({START, (1, 1)})
