"""docs/tutorial-vllm.md and its short form in README.md, typed with a server that answers as vLLM does."""

import json
import os
import re
import sys

from support.paths import ROOT
from support.ports import free_port
from support.readme import section, shell_lines, typed

README, PAGE = ROOT / "README.md", ROOT / "docs" / "tutorial-vllm.md"
BY_HAND = ("git clone", "python3.11 -m venv", "pip install")
"""What is not typed by tests: it needs a network."""
MODULE = "vllm.entrypoints.openai.api_server"
UP = "curl -sf --retry 150 --retry-delay 2 --retry-all-errors http://127.0.0.1:8000/health"


def readme_lines():
    """Return what README.md has typed."""
    return shell_lines(section(README, "Your own trainer to vLLM"))


def page_lines():
    """Return what the tutorial has typed, with both ways to start vLLM."""
    lines = shell_lines(PAGE.read_text().partition("\n## With your own model\n")[0])
    return [line for line in lines if not line.startswith(BY_HAND)]


def train(lines, place, steps, *, stand_in):
    """Type commands in a copy of what the checkout has, and return what was printed.

    Args:
        lines: The commands of a page.
        place: An empty directory.
        steps: Steps of training, instead of the page's.
        stand_in: Whether `vllm serve` is typed, which here is a stand-in; else what the page has for processors.
    """
    (place / "examples").symlink_to(ROOT / "examples")
    left_out = MODULE if stand_in else "vllm serve"
    script = "\n".join(line for line in lines if left_out not in line)
    script = re.sub(r"(\n(?:\S*=\S+ )*\S*(?:vllm serve|python -m vllm).*\n)", rf"\1{UP}\n", script)
    is_new = f"curl -s http://127.0.0.1:8000/weight_info | grep -q '1[.]{steps}[.]'"
    script = script.replace("sleep 5", f"until {is_new}; do sleep 0.2; done")
    script = (
        script.replace("8000", str(free_port())).replace("400", str(steps)).replace("399", str(steps - 1))
    )
    script = script.replace("sums.py base/model job", f"sums.py base/model job --steps {steps} --pause 0")
    whole = f"set -em\ntrap 'kill $(jobs -p)' EXIT\n{script}\n"
    said = typed(whole, place, limit=1500, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", **environment(place))
    (place / "said").write_text(said)
    return said


def environment(place):
    """Return the programs of the page: those of this environment, and a `vllm` that is a stand-in."""
    for folder in ("bin", ".venv-vllm/bin"):
        (place / folder).mkdir(parents=True, exist_ok=True)
        program = place / folder / "vllm"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/support/served_model.py "$@"\n')
        program.chmod(0o755)
    here = os.path.dirname(sys.executable)
    return {"PATH": f"{place}/bin:{here}:{os.environ['PATH']}", "PYTHONPATH": ""}


def completions(said):
    """Return the answers of the server to the prompts of the page, in their order."""
    starts = [found.start() for found in re.finditer(r'\{"(?:id|choices)"', said)]
    answers = [json.JSONDecoder().raw_decode(said[start:])[0] for start in starts]
    return [answer["choices"][0]["text"] for answer in answers]
