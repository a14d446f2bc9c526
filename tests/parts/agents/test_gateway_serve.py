"""`explorer serve` as a process with a model of its own: eight sessions, a kill and a version in the middle."""

import copy
import itertools
import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from support import matrices
from support.chat_model import write_chat_model
from support.gateway_case import SIZE, play, record_sessions, write_file
from support.served_process import MINUTES, ServedProcess, patiently

from explorer_hooks.cli.main import run as command_line
from syncd.cli.main import run as syncd_command
from syncd.synchronizer import Synchronizer

pytestmark = pytest.mark.slow


@pytest.fixture
def world(running_world):
    return running_world


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return directory of the start model, and the model of each step."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("chat")
    return directory / "0", {step: write_chat_model(directory / str(step), step) for step in (0, 1)}


@pytest.fixture
def file(models, tmp_path):
    return write_file(tmp_path / "job.toml", models[0])


@pytest.fixture
def served(file):
    made = ServedProcess(file)
    yield made
    made.end()


def test_eight_sessions_at_once_with_a_kill_and_a_version_in_the_middle_are_recorded_exactly(
    models, world, served
):
    record_sessions(models[1], world, served, 1e-4)


@matrices.LONG
def test_versions_that_are_adapters_are_recorded_exactly_too(models, world, tmp_path):
    """As above; step 1 is an adapter, by which the answers change."""
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(copy.deepcopy(models[1][0]), config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0, 0.2)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    served = ServedProcess(write_file(tmp_path / "job.toml", models[0], lora={"rank": 4, "alpha": 8}))
    publish = ["publish", str(world.root), "1", str(tmp_path / "adapter")]
    try:
        record_sessions({0: models[1][0], 1: adapted}, world, served, 1e-4, lambda: syncd_command(publish))
    finally:
        served.end()


def test_the_open_groups_of_a_lost_host_are_counted_in_the_next_batch(world, served, file):
    """Two groups are open, one with a turn; the gateway and its journal's directory go, and another one begins."""
    driver = served.await_answer()
    with Synchronizer.open(world.root, "trainer", timeout=MINUTES):
        play(driver, "g0", 0, 1, lambda _: None)
        patiently(lambda: driver.session("g1", 0))
        own = Path(world.root, "explorers", "e0")
        end = time.monotonic() + MINUTES
        while json.loads((own / "gateway.json").read_text())["groups"] != 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        served.kill()
        shutil.rmtree(served.directory)
        served.start()
        driver = served.await_answer()
        for group, rollout in itertools.product(("h0", "h1"), range(SIZE)):
            play(driver, group, rollout, 1, lambda _: None)
        while not (own / "metrics.jsonl").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
    assert served.wait() == 0
    assert any("journal_lost" in line and '"groups": 2' in line for line in served.said), served.said
    (line,) = map(json.loads, (own / "metrics.jsonl").read_text().splitlines())
    assert (line["dropped"], json.loads((own / "gateway.json").read_text())["groups"]) == ({"host": 2}, 0)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--explorer.teacher.address", "http://127.0.0.1:1"], "explorer serve asks no teacher"),
        (["--explorer.evaluation.tasks", "x.jsonl"], "explorer serve evaluates nothing"),
        (["--explorer.gateway.history", "exactly"], "explorer.gateway.history"),
        (["--explorer.engine.spans", "off"], "needs the version of each token"),
    ],
)
def test_what_a_gateway_does_not_do_is_an_error_before_anything_is_opened(file, capsys, more, said):
    assert command_line(["serve", str(file), "--name", "e0", *more]) == 78
    assert said in capsys.readouterr().err
