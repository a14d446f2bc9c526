"""`explorer serve` before a real vLLM on the CPU: exact tokens, log-probs and versions, over a kill and a reload."""

import pytest
import torch
from support.chat_model import write_chat_model
from support.engine_process import python_of
from support.gateway_case import record_sessions, write_file
from support.served_process import ServedProcess
from support.vllm_process import vllm

PYTHON = python_of("SYNCD_VLLM_PYTHON", ".venv-vllm/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def world(running_world):
    return running_world


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return directory of the start model, and the model of each step."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("chat")
    return directory / "0", {step: write_chat_model(directory / str(step), step, 512) for step in (0, 1)}


@pytest.fixture(params=[["--enable-scale-out"], []], ids=["scale-out", "without"])
def engine(request, models, tmp_path):
    made = vllm(PYTHON, str(models[0]), tmp_path / "log", *request.param)
    made.start()
    yield made, bool(request.param)
    made.kill()


def test_sessions_are_recorded_exactly_and_a_server_without_the_routes_is_refused(
    models, world, engine, tmp_path
):
    process, has_routes = engine
    served = ServedProcess(
        write_file(tmp_path / "job.toml", models[0], {"kind": "vllm", "address": process.address})
    )
    try:
        if has_routes:
            record_sessions(models[1], world, served, 1e-3)
        else:
            assert served.wait() == 78, served.said
            assert "--enable-scale-out" in "".join(served.said)
    finally:
        served.end()
