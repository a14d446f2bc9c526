"""The tutorial to vLLM and its short form in README.md, typed with a server that answers by the weights it loads."""

import pytest

for needed in ("torch", "transformers"):
    pytest.importorskip(needed, reason=f"the tutorial needs {needed}")

from support import matrices, tutorial  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]

STEPS = 80


@pytest.mark.parametrize(
    "lines", matrices.rows([tutorial.readme_lines, tutorial.page_lines], tutorial.page_lines)
)
def test_the_commands_of_the_page_train_and_the_server_answers_with_the_last_version(lines, tmp_path):
    said = tutorial.train(lines(), tmp_path, STEPS, stand_in=True)
    assert f"step {STEPS}: loss " in said
    assert f"\nversion  1.{STEPS} " in said
    assert tutorial.completions(said)[-1:], "the server answered"
    engine = next(line for line in said.splitlines() if line.startswith("vllm-0"))
    assert "proven" in engine, engine
    if lines is tutorial.page_lines:
        assert f'"weight_version": "1.{STEPS}.' in said
        assert len(set(tutorial.completions(said))) == 2, "another answer than before"
