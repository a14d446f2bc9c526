"""A model that generates while a follower in another thread loads what the daemon publishes."""

import threading
import time
import uuid

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
