"""A model that generates while a follower in another thread loads what the daemon publishes."""

import threading
import time
import uuid
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from safetensors.torch import save  # noqa: E402
from support.followers import Scene  # noqa: E402
from support.tied_qwen import log_probs, tiny  # noqa: E402
from support.waiting import until  # noqa: E402

from explorer_hooks.hooks.transformers import TransformersHook  # noqa: E402
from syncd.protocol.version import pair_of  # noqa: E402
from syncd.protocol.writer import StepWriter  # noqa: E402

WAIT = 120.0


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path / "job")
    yield made
    made.close()


def publish(scene, step, *, damaged=False):
    """Publish a whole model; a damaged one has a byte changed after it was sealed."""
    state = tiny(step).state_dict()
    del state["lm_head.weight"]
    writer = StepWriter(scene.job, step, 1, uuid.uuid4().hex)
    writer.begin()
    shard = writer.write("actor/model-00001-of-00001.safetensors", save(state), tensors=len(state))
    writer.receipt(1, [shard])
    writer.seal()
    writer.announce()
    if damaged:
        with open(f"{scene.payload(step)}/model-00001-of-00001.safetensors", "r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x7f")
    scene.tick()


@pytest.mark.parametrize("stage", [False, True], ids=["hashed on the way", "staged"])
def test_each_generation_uses_one_published_version_and_never_a_damaged_one(scene, tmp_path, stage):
    hook = TransformersHook(tiny(0), timeout=60)
    references = {None: log_probs(tiny(0)), **{(1, step): log_probs(tiny(step)) for step in (1, 2, 4)}}
    more = {"stage": str(tmp_path / "stage")} if stage else {}
    follower = scene.follow("e0", hook, verify="header", retries=1, **more)
    over, wrong, seen = threading.Event(), [], []

    def generate():
        while not over.is_set():
            with hook.generating() as label:
                if not torch.equal(log_probs(hook.model), references[pair_of(label)]):
                    wrong.append(label)
            seen.append(pair_of(label))
            time.sleep(0.002)

    threads = [threading.Thread(target=generate), threading.Thread(target=follower.run, args=(over.is_set,))]
    for thread in threads:
        thread.start()
    try:
        for step in (1, 2):
            publish(scene, step)
            until(lambda step=step: (1, step) in seen[-3:])
        publish(scene, 3, damaged=True)
        until(lambda: 3 in [one["step"] for one in scene.presence().info["given_up"]])
        assert hook.current_version().pair == (1, 2)
        publish(scene, 4)
        until(lambda: (1, 4) in seen[-3:])
    finally:
        over.set()
        for thread in threads:
            thread.join(WAIT)
    assert wrong == []
    assert follower.applied == (1, 4)


class FailingAtTwo(TransformersHook):
    """A model that cannot load step 2 for a reason of its own."""

    def __init__(self, model):
        super().__init__(model)
        self.loads = []

    def load(self, target):
        self.loads.append(target.version.pair)
        if target.version.step == 2:
            raise RuntimeError("out of memory")
        super().load(target)


def read_once(monkeypatch):
    monkeypatch.setattr(
        "syncd.transports.files.stage.check_copy", lambda *_: pytest.fail("it was hashed before")
    )


@pytest.fixture
def followers(scene, tmp_path):
    """Return two followers that share a stage and run a version, and the hook of the second."""
    hooks = [TransformersHook(tiny(0)) for _ in range(2)]
    stage = str(tmp_path / "stage")
    first, other = [scene.follow(f"e{number}", hook, stage=stage) for number, hook in enumerate(hooks)]
    publish(scene, 1)
    assert [follower.turn(0.0).kind for follower in (first, other)] == ["applied", "applied"]
    return first, other, hooks[1]


def staged_by(follower, scene, tmp_path, step):
    publish(scene, step)
    assert follower.turn(0.0).kind == "applied"
    return shard_of(tmp_path, step)


def shard_of(tmp_path, step):
    (path,) = (tmp_path / "stage").glob(f"*/1.{step}-*/model-00001-of-00001.safetensors")
    return path


def test_a_copy_of_another_process_is_hashed_while_it_is_loaded_and_made_again(scene, followers, tmp_path):
    first, other, hook = followers
    path = staged_by(first, scene, tmp_path, 2)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert other.turn(0.0).kind == "applied"
    assert torch.equal(log_probs(hook.model), log_probs(tiny(2)))
    assert {"copy_load_failed", "stage_copy_damaged"} <= set(scene.names())
    made_again = shard_of(tmp_path, 2)
    assert made_again.read_bytes() == Path(scene.payload(2), path.name).read_bytes()


def test_a_whole_copy_of_another_process_is_read_once(scene, followers, tmp_path, monkeypatch):
    first, other, hook = followers
    staged_by(first, scene, tmp_path, 2)
    read_once(monkeypatch)
    assert other.turn(0.0).kind == "applied"
    assert torch.equal(log_probs(hook.model), log_probs(tiny(2)))


def test_an_engine_that_could_not_go_back_is_not_touched_by_a_damaged_copy(scene, followers, tmp_path):
    path = staged_by(followers[0], scene, tmp_path, 2)
    path.write_bytes(bytes(path.stat().st_size))
    new = scene.follow("e2", TransformersHook(tiny(0)), stage=str(tmp_path / "stage"), retries=1)
    assert new.turn(0.0).kind == "applied"
    assert "stage_copy_damaged" in scene.names()
    assert "copy_load_failed" not in scene.names()


def test_a_load_that_fails_for_another_reason_leaves_the_copy(scene, followers, tmp_path):
    hook = FailingAtTwo(tiny(0))
    failing = scene.follow("e2", hook, stage=str(tmp_path / "stage"), retries=1)
    assert failing.turn(0.0).kind == "applied"
    path = staged_by(followers[0], scene, tmp_path, 2)
    assert failing.turn(0.0).kind != "applied"
    assert hook.loads.count((1, 2)) == 1
    assert path.exists()
    assert "copy_load_failed" not in scene.names()
