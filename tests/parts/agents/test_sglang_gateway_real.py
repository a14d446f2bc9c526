"""`explorer serve` before a real SGLang on the CPU: exact tokens, log-probs, versions, over a kill and a reload."""

import os

import pytest
import torch
from support.chat_model import write_chat_model
from support.engine_process import python_of
from support.gateway_case import record_sessions, write_file
from support.served_process import ServedProcess
from support.sglang_process import sglang
from support.synchronizers import Threads, World

PYTHON = python_of("SYNCD_SGLANG_PYTHON", ".venv-sglang/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_sessions_are_recorded_exactly(tmp_path):
    torch.set_num_threads(1)
    models = {step: write_chat_model(tmp_path / str(step), step, 512) for step in (0, 1)}
    os.mkdir(tmp_path / "job")
    world, engine = World(tmp_path / "job", Threads()), sglang(PYTHON, str(tmp_path / "0"), tmp_path / "log")
    world.run()
    engine.start()
    served = ServedProcess(
        write_file(tmp_path / "job.toml", tmp_path / "0", {"kind": "sglang", "address": engine.address})
    )
    try:
        record_sessions(models, world, served, 1e-3)
    finally:
        served.end()
        engine.kill()
        world.shut()
