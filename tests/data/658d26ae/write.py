"""Writes what lies beside it; run in a checkout of tree 658d26ae:

    PYTHONPATH=.:tests:tests/trainer/engines/installed python write.py DIRECTORY

A trainer trains three steps and stops at a full checkpoint, a follower applies the newest version, four batches are
left. `deltas` is a job whose second and third step are deltas, by `syncd publish --delta-from`.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from safetensors.torch import save_file
from support.trainers import write_experiences
from torch import arange, float32

FILE = """
[job]
dir = "{job}"
[model]
path = "{job}/model"
[engine]
name = "tests.tiny"
[algorithm.optimizer]
lr = 0.01
[data]
groups = 2
group_size = 2
consumed = "archive"
[trainer]
nproc = 1
total_steps = {steps}
save_interval = 2
[daemon]
prune = false
"""


def run(*arguments: str) -> None:
    """Run a program of this tree."""
    subprocess.run([sys.executable, "-m", *arguments], check=True)


def trained(job: Path) -> None:
    """Train three steps, and let a follower load the last one."""
    job.mkdir(parents=True)
    write_experiences(str(job), 7)
    file = job.with_suffix(".toml")
    file.write_text(FILE.format(job=job, steps=3))
    run("trainer", "train", str(file))
    run("syncd", "watch", str(job), "--once")
    run("syncd", "follow", str(job), "--hook", "command", "--identity", "e0", "--once", "--", "true")
    file.unlink()


def deltas(job: Path) -> None:
    """Publish a model and two deltas of it."""
    job.mkdir(parents=True)
    weights = job.with_name("weights")
    for step in (1, 2, 3):
        weights.mkdir(exist_ok=True)
        tensor = arange(4096, dtype=float32)
        tensor[: step * 16] += step
        save_file({"w": tensor.reshape(64, 64)}, weights / "model.safetensors")
        run(
            "syncd",
            "publish",
            str(job),
            str(step),
            str(weights),
            *(["--delta-from", str(step - 1)] * (step > 1)),
        )
        run("syncd", "watch", str(job), "--once")
    shutil.rmtree(weights)


if __name__ == "__main__":
    place = Path(sys.argv[1]).resolve()
    trained(place / "job")
    deltas(place / "deltas")
