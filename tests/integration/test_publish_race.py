"""Two `syncd publish` of one step at the same time: one wins, the other says so, and what is sealed is the winner's.

SYNCD_RACES says how many races are run instead of the few by default (`make publish-races`).
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.forked import run_forked

RACES = int(os.environ.get("SYNCD_RACES", "6"))
SHARDS, BYTES = 4, 1 << 18
REFUSALS = (2, 65, 74, 75)
"""How one that loses ends: documented exit codes (docs/commands.md), each with an error that says what happened."""


def write_export(directory):
    """Write what a trainer would export: the same names and shapes each time, other bytes."""
    directory.mkdir(parents=True)
    for number in range(1, SHARDS + 1):
        tensor = {f"layers.{number}.weight": {"dtype": "U8", "shape": [BYTES], "data_offsets": [0, BYTES]}}
        header = json.dumps(tensor).encode()
        header += b" " * (-len(header) % 8)
        path = directory / f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + os.urandom(BYTES))
    return directory


def publish(job, step, source):
    return run_forked(
        [sys.executable, "-m", "syncd", "publish", str(job), str(step), str(source)], timeout=120
    )


def shards_of(directory):
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def race(pool, job, step, exports):
    """Publish two exports as one step at once; return what is wrong then."""
    done = list(pool.map(lambda source: publish(job, step, source), exports))
    statuses = [one.returncode for one in done]
    if statuses.count(0) != 1:
        return [f"step {step}: ended with {statuses}: {[one.stderr[-300:] for one in done]}"]
    winner = statuses.index(0)
    loser = done[1 - winner]
    wrong = []
    if loser.returncode not in REFUSALS or not loser.stderr.startswith("error: "):
        wrong.append(f"step {step}: the loser ended with {loser.returncode}: {loser.stderr[-500:]}")
    if shards_of(job / f"global_step_{step}/actor") != shards_of(exports[winner]):
        wrong.append(f"step {step}: the sealed bytes are not those of the one that won")
    verified = run_forked(
        [sys.executable, "-m", "syncd", "verify", str(job), str(step), "--deep"], timeout=120
    )
    if verified.returncode != 0:
        wrong.append(f"step {step}: verify ended with {verified.returncode}: {verified.stderr[-300:]}")
    return wrong


@pytest.mark.timeout(max(300, 5 * RACES))
def test_of_two_concurrent_publishes_of_a_step_exactly_one_wins(tmp_path, record_line):
    job, exports = tmp_path / "job", [write_export(tmp_path / "exports" / name) for name in ("a", "b")]
    job.mkdir()
    with ThreadPoolExecutor(2) as pool:
        wrong = [problem for step in range(1, RACES + 1) for problem in race(pool, job, step, exports)]
    record_line(f"publish: {RACES} races of two for one step, {len(wrong)} problems")
    assert not wrong, "\n".join(wrong)
