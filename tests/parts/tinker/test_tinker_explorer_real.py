"""A whole job on a real tinker server: trainer, daemon and explorer as processes, the trainer killed once."""

import contextlib
import glob
import json
import os
import signal
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
pytest.importorskip("tinker", reason="the SDK: pip install 'syncd[tinker]'")
pytest.importorskip("peft", reason="adapters are compared with peft")

from support import tinker_process  # noqa: E402
from support.engine_process import python_of  # noqa: E402
from support.paths import PYTHONPATH  # noqa: E402

from syncd.experience.table import decode_batch  # noqa: E402
from syncd.parts.tinker.session import TinkerSession  # noqa: E402
from syncd.protocol.layout import Job  # noqa: E402
from syncd.protocol.manifest import read_manifest  # noqa: E402
from trainer.parts.tinker.adapter import CONFIG, WEIGHTS, download_adapter  # noqa: E402

PYTHON = python_of("SYNCD_TINKER_PYTHON", ".venv-tinker/bin/python")
KEY = "tml-test"
STEPS = 4
PATIENCE = 1200.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    # The SDK leaves its connections to the collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

REWARD = """
def score(prompt, response, task):
    words = response.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(len(words), 1)
"""
FILE = """
[job]
dir = "job"
[model]
path = "{model}"
[engine]
name = "tinker"
compute_dtype = "float32"
[engine.options]
url = "{url}"
rank = {rank}
[algorithm]
old_logprobs = "rollout"
[algorithm.optimizer]
lr = 5e-3
clip_grad = 1e6
[data]
groups = 2
group_size = 4
consumed = "archive"
[trainer]
total_steps = {steps}
save_interval = 1
[explorer]
name = "e0"
tasks = "tasks.jsonl"
[explorer.engine]
kind = "tinker"
address = "{url}"
[explorer.sampling]
max_tokens = 6
[explorer.reward]
function = "reward:score"
"""


@pytest.fixture
def server(tmp_path):
    os.makedirs(tmp_path / "server")
    model = tinker_process.make_qwen3(tmp_path / "model")
    process = tinker_process.tinker_server(PYTHON, tmp_path / "server", model)
    process.start()
    yield process
    process.kill()
    tinker_process.collect_connections()


@contextlib.contextmanager
def program(place, name, *argv):
    """Run a command with its output in a log; it is killed at the end."""
    env = os.environ | {"PYTHONPATH": PYTHONPATH, "TINKER_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    with open(f"{place}/{name}.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *argv], cwd=place, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def said(place):
    found = []
    for name in sorted(glob.glob(f"{place}/*.log")):
        with open(name, errors="replace") as file:
            found.append(f"--- {name}\n{file.read()[-3000:]}")
    return "\n".join(found)


def saved(place):
    with (
        contextlib.suppress(OSError, ValueError),
        open(f"{place}/job/latest_checkpointed_iteration.txt") as file,
    ):
        return int(file.read())
    return 0


def await_saved(place, step, process):
    end = time.monotonic() + PATIENCE
    while saved(place) < step:
        assert process.poll() is None, said(place)
        assert time.monotonic() < end, said(place)
        time.sleep(0.2)


def experiences(place):
    for name in sorted(glob.glob(f"{place}/job/experiences/.archive/e0/*.parquet")):
        with open(name, "rb") as file:
            yield from decode_batch(file.read(), name)


def modules_of(place, server, model, steps):
    """Return a model for each version, as transformers and peft make it of what the server keeps."""
    job, session = Job.at(f"{place}/job"), TinkerSession(server.address, KEY, 120)
    rest = session.call("a session", session.service.create_rest_client)
    found = {}
    for step in steps:
        directory = f"{place}/adapters/{step}"
        os.makedirs(directory)
        manifest = read_manifest(job.disk, job.step(step))
        assert manifest.kind == "remote"
        owner, _, name = manifest.uri.removeprefix("tinker://").partition("/")
        name = name.removeprefix("sampler_weights/")
        url = session.result("an address", rest.get_checkpoint_archive_url(owner, name)).url
        adapter = download_adapter(url, model, 60)
        for file_name, content in ((CONFIG, adapter.config), (WEIGHTS, adapter.weights)):
            with open(f"{directory}/{file_name}", "wb") as file:
                file.write(content)
        found[step] = tinker_process.adapted(model, directory)
    session.close()
    return found


def test_each_token_was_sampled_from_the_version_that_its_rollout_names(tmp_path, server):
    model = str(tmp_path / "model")
    settings = {"url": server.address, "rank": tinker_process.RANK, "steps": STEPS, "model": model}
    (tmp_path / "grpo.toml").write_text(FILE.format(**settings))
    (tmp_path / "reward.py").write_text(REWARD)
    tasks = [
        {"prompt": f"w{one} w{one + 1} w{one + 2}", "answer": "", "id": str(one)} for one in range(3, 40)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    explore, train = ("explorer_hooks", "run", "grpo.toml"), ("trainer", "train", "grpo.toml")
    with program(tmp_path, "first-explorer", *explore), program(tmp_path, "killed", *train) as trainer:
        await_saved(tmp_path, 2, trainer)
    with program(tmp_path, "trainer", *train) as trainer, program(tmp_path, "explorer", *explore) as explorer:
        assert trainer.wait(PATIENCE) == 0, said(tmp_path)
        assert explorer.wait(PATIENCE) == 0, said(tmp_path)
    assert saved(tmp_path) == STEPS
    rows = list(experiences(tmp_path))
    steps = sorted({one.step for one in rows})
    assert len(steps) >= 3, steps
    modules = modules_of(tmp_path, server, model, [step for step in steps if step])
    modules[0] = base_of(model)
    apart, other = [], []
    for one in rows:
        for step, found in ((one.step, apart), ((one.step + 1) % len(modules), other)):
            with torch.no_grad():
                own = tinker_process.next_logprobs(modules[step], one.tokens)[one.prompt_length - 1 :]
            found.append((own - torch.tensor(list(one.logprobs))).abs().max().item())
    assert max(apart) < 1e-3
    assert sorted(other)[len(other) // 2] > 1e-2


def base_of(model):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
