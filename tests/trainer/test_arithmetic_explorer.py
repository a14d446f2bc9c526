"""The arithmetic explorer as a process: follows a daemon's versions, writes experiences, ends by itself."""

import json
import os
import signal
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import forked
from support.waiting import LONG
from support.waiting import until as eventually
from transformers import AutoModelForCausalLM

from syncd.errors import TimedOutError
from syncd.experience import batch_paths
from syncd.experience.table import decode_batch
from syncd.protocol.presence import RunningStatus, path_of
from syncd.transports.files.step_saver import StepSaver

ARITHMETIC = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "arithmetic")
sys.path.insert(0, ARITHMETIC)

from explorer import _model_of, _while_trained  # noqa: E402
from problems import Problem  # noqa: E402
from tiny_model import make_model  # noqa: E402

pytestmark = pytest.mark.slow

GROUPS, SIZE = 2, 3


@pytest.fixture
def world(running_world):
    return running_world


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return the directory of the model that everybody starts from."""
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, 1)
    return directory


@pytest.fixture
def explore(world, directory):
    """Start explorers with small batches; they are killed in the end if they have not ended."""
    started = []

    def start(name, *options):
        argv = (f"{ARITHMETIC}/explorer.py", world.root, "--model", directory)
        sizes = ("--groups", GROUPS, "--group-size", SIZE)
        log = f"{world.root}.{len(started)}.log"
        started.append(forked.start(log, {}, *argv, "--name", name, *sizes, *options))
        return started[-1]

    yield start
    for process in started:
        process.end()


def changed(directory, seed):
    """Return the model with some change of its weights."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def save(world, step, model):
    """Write a step as a trainer of one rank does."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    saver = StepSaver(world.job, 0, 1, dtype=None, timeout=LONG)
    saver.save(
        step, f"a-{step}", list(tensors.items()), {"config.json": model.config.to_json_string().encode()}
    )
    saver.close()


def written(world, name):
    return batch_paths.numbers(world.job, batch_paths.batches(world.job, name))


def batch(world, name, number):
    """Return a batch once it is there."""
    eventually(lambda: number in written(world, name))
    path = batch_paths.batch(world.job, name, number)
    return decode_batch(world.job.disk.read(path, 1 << 28), path)


def waits(world, name, pair):
    """Wait until an explorer that runs a version asks for the next one: it will write no more with this one."""
    eventually(lambda: (one := world.explorer(name)).applied == pair and _asks(one))


def _asks(presence):
    return presence.status is RunningStatus.REQUIRE_SYNC


def versions(experiences):
    return {(experience.generation, experience.step) for experience in experiences}


def largest_error(model, experiences):
    """Return by how much recorded log-probs differ from those of a model."""
    worst = 0.0
    for experience in experiences:
        tokens = torch.tensor([list(experience.tokens)])
        with torch.inference_mode():
            logprobs = model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(-1, tokens[0, 1:, None])[experience.prompt_length - 1 :, 0]
        worst = max(worst, (expected - torch.tensor(list(experience.logprobs))).abs().max().item())
    return worst


def test_on_policy_writes_one_batch_for_each_version_made_by_that_version(
    world, explore, directory, tmp_path
):
    trainer = world.open("trainer", "trainer")
    process = explore("e0", "--ahead", 0, "--evaluate", tmp_path / "accuracy.jsonl")
    models = {0: AutoModelForCausalLM.from_pretrained(directory).eval()}
    first = batch(world, "e0", 1)
    for step in (1, 2):
        eventually(lambda: _asks(world.explorer("e0")))
        models[step] = changed(directory, step)
        save(world, step, models[step])
        experiences = batch(world, "e0", step + 1)
        waits(world, "e0", (1, step))
        assert written(world, "e0") == set(range(1, step + 2))
        assert versions(experiences) == {(1, step)}
        assert largest_error(models[step], experiences) < 1e-5 < largest_error(models[step - 1], experiences)
    trainer.set_model_state_dict(None, 1, rewind=True)
    again = batch(world, "e0", 4)
    assert versions(first) == {(1, 0)}
    assert versions(again) == {(2, 1)}
    assert largest_error(models[1], again) < 1e-5
    trainer.close()
    assert process.wait(LONG) == 0
    lines = [json.loads(line) for line in (tmp_path / "accuracy.jsonl").read_text().splitlines()]
    assert [(line["generation"], line["step"]) for line in lines] == [(1, 0), (1, 1), (1, 2), (2, 1)]
    assert all(0 <= line["accuracy"] <= 1 for line in lines)


def test_explorers_together_stop_at_the_bound_and_exit_on_sigterm(world, explore):
    world.open("trainer", "trainer")
    early = explore("e0", "--ahead", 2)
    groups = [batch(world, "e0", number) for number in (1, 2, 3)]
    eventually(lambda: _asks(world.explorer("e0")))
    assert written(world, "e0") == {1, 2, 3}
    for experiences in groups:
        members = {}
        for experience in experiences:
            members.setdefault((experience.group, experience.task), []).append(experience.rollout)
            left, right = experience.task.rstrip("=").split("+")
            assert Problem(int(left), int(right)).split == "train"
        assert list(members.values()) == [list(range(SIZE))] * GROUPS
    names = {experience.group for experiences in groups for experience in experiences}
    assert len(names) == 3 * GROUPS
    late = explore("e1", "--ahead", 2)
    eventually(lambda: os.path.exists(path_of(world.job.explorers, "e1")) and _asks(world.explorer("e1")))
    assert written(world, "e1") == set()
    for process in (early, late):
        process.send_signal(signal.SIGTERM)
    assert [process.wait(LONG) for process in (early, late)] == [0, 0]
    assert world.explorer("e0").status is RunningStatus.STOPPED


def test_an_adapter_is_added_to_the_model_of_the_start(directory, tmp_path):
    base, config = (
        AutoModelForCausalLM.from_pretrained(directory),
        LoraConfig(r=4, target_modules="all-linear"),
    )
    adapted = get_peft_model(base, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05 if "lora_B" in name else 0.0)
    adapted.save_pretrained(tmp_path)
    tokens = torch.arange(4, 12)[None]
    loaded = _model_of("lora", str(tmp_path), str(directory))
    with torch.inference_mode():
        expected, plain = adapted(input_ids=tokens).logits, adapted.base_model.model
        torch.testing.assert_close(loaded(input_ids=tokens).logits, expected, atol=1e-5, rtol=1e-5)
        with adapted.disable_adapter():
            assert not torch.allclose(plain(input_ids=tokens).logits, expected, atol=1e-2)


def test_a_trainer_that_never_comes_times_out(world):
    explorer = world.open("explorer", "e0")
    with pytest.raises(TimedOutError, match="no trainer"):
        for _ in _while_trained(explorer, 0.01):
            pass
