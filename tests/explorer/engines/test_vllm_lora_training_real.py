"""A job that trains adapters with real vLLM on the CPU: each token's log-prob is that of the version in its label."""

import pytest
from support.engine_process import python_of
from support.lora_job import TrainsAdapters, finished, prepare
from support.real_adapters import LORA_FLAGS
from support.vllm_process import vllm

PYTHON = python_of("SYNCD_VLLM_PYTHON", ".venv-vllm/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

FLAGS = [*LORA_FLAGS, "--max-loras", "4", "--max-cpu-loras", "8"]


class TestVllm(TrainsAdapters):
    product = "vLLM"

    @pytest.fixture(scope="class")
    @classmethod
    def job(cls, tmp_path_factory):
        """Return the directory of a job that has ended, and what the engine lists then."""
        root = tmp_path_factory.mktemp("lora-job")
        flags = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
        engine = vllm(PYTHON, prepare(root), root / "vllm.log", *FLAGS, **flags)
        engine.start()
        try:
            yield finished(root, "vllm", engine)
        finally:
            engine.kill()
