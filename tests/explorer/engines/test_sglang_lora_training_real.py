"""A job that trains adapters with real SGLang on the CPU: each token is of the version in its label."""

import pytest
from support.engine_process import python_of
from support.lora_job import TrainsAdapters, finished, prepare
from support.sglang_process import LORA, sglang

PYTHON = python_of("SYNCD_SGLANG_PYTHON", ".venv-sglang/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class TestSglang(TrainsAdapters):
    product = "SGLang"

    @pytest.fixture(scope="class")
    @classmethod
    def job(cls, tmp_path_factory):
        """Return the directory of a job that has ended, and what the engine lists then."""
        root = tmp_path_factory.mktemp("lora-job")
        engine = sglang(PYTHON, prepare(root), root / "sglang.log", *LORA)
        engine.start()
        try:
            yield finished(root, "sglang", engine, {"drain": "0.001"})
        finally:
            engine.kill()
