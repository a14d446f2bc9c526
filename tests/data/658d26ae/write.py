"""Write what lies beside this file; run it in a checkout of tree 658d26ae:

    PYTHONPATH=.:tests:tests/trainer/engines/installed python write.py DIRECTORY

`job`: a trainer trained three steps and stopped at a full checkpoint, a follower applied the newest version, four
batches are left. `verl`: the same by verl's engine, two steps; `after_verl` is where that tree came in one step more.
`deltas`: the second and third step are deltas, by `syncd publish --delta-from`.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from safetensors.torch import save_file
from support.trainers import write_experiences
from torch import arange, float32

from examples.arithmetic import tiny_model

FILE = """
[job]
dir = "{job}"
[model]
path = "{model}"
[engine]
name = "{engine}"
device = "cpu"
compute_dtype = "float32"
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


def train(job: Path, engine: str, model: str, *, steps: int, batches: int) -> None:
    """Train a job on the first of its batches, publish its last step, and let a follower load it."""
    job.mkdir(parents=True)
    write_experiences(str(job), batches)
    file = job.with_suffix(".toml")
    file.write_text(FILE.format(job=job, model=model, engine=engine, steps=steps))
    run("trainer", "train", str(file))
    run("syncd", "watch", str(job), "--once")
    run("syncd", "follow", str(job), "--hook", "command", "--name", "e0", "--once", "--", "true")
    file.unlink()


def next_step(job: Path, model: str, step: int) -> None:
    """Train a copy of a job to one step more, and keep the weights of that step alone."""
    copy = shutil.copytree(job, job.with_name("after_" + job.name))
    file = copy.with_suffix(".toml")
    file.write_text(FILE.format(job=copy, model=model, engine="verl", steps=step))
    run("trainer", "train", str(file))
    weights = next((copy / f"global_step_{step}" / "actor").glob("*.safetensors"))
    weights.rename(copy.with_suffix(".safetensors"))
    shutil.rmtree(copy)
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
        parent = ["--delta-from", str(step - 1)] if step > 1 else []
        run("syncd", "publish", str(job), str(step), str(weights), *parent)
        run("syncd", "watch", str(job), "--once")
    shutil.rmtree(weights)


def small_model(directory: Path) -> str:
    """Write a model of some thousand parameters, and return where it is."""
    tiny_model.HIDDEN, tiny_model.HEADS, tiny_model.INNER, tiny_model.LAYERS = 16, 2, 16, 1
    tiny_model.CHARACTERS = "".join(map(chr, range(0x4E00, 0x4E00 + 61)))
    tiny_model.make_model(directory, 7, tied=False)
    return str(directory)


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    train(target / "job", "tests.tiny", "/nowhere", steps=3, batches=7)
    model = small_model(target / "model")
    train(target / "verl", "verl", model, steps=2, batches=3)
    next_step(target / "verl", model, 3)
    deltas(target / "deltas")
