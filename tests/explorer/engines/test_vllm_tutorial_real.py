"""docs/tutorial-vllm.md as it is typed, with real vLLM on the CPU: the server answers with the last version."""

import os
from pathlib import Path

import pytest
from support import tutorial
from support.engine_process import python_of

PYTHON = python_of("SYNCD_VLLM_PYTHON", ".venv-vllm/bin/python")
STEPS = 200

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_real_server_answers_with_what_the_loop_of_the_page_has_learned(tmp_path):
    (tmp_path / ".venv-vllm" / "bin").mkdir(parents=True)
    # A link would be another environment to Python.
    program = tmp_path / ".venv-vllm" / "bin" / "python"
    program.write_text(f'#!/bin/sh\nexec {os.path.abspath(PYTHON)} "$@"\n')
    Path(program).chmod(0o755)
    said = tutorial.train(tutorial.page_lines(), tmp_path, STEPS, stand_in=False)
    engine = next(line for line in said.splitlines() if line.startswith("vllm-0"))
    assert "proven" in engine, engine
    assert f'"weight_version":"1.{STEPS}.' in said.replace(": ", ":")
    before, after = tutorial.completions(said)
    assert before != after
