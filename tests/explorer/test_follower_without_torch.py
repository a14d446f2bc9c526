"""A follower whose hook needs no torch: what it imports, and what it loads, in a process that cannot import torch."""

import subprocess
import sys

import pytest
from support.cli import environment
from support.followers import Scene

BLOCK = """
import sys


class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoTorch())
"""

MODULES = [
    "explorer_hooks.finding",
    "explorer_hooks.follower.service",
    "explorer_hooks.hooks.callback",
    "explorer_hooks.hooks.command",
    "explorer_hooks.hooks.vllm_lora",
    "explorer_hooks.hooks.sglang",
    "explorer_hooks.hooks.sglang_lora",
    "explorer_hooks.hooks.vllm",
    "explorer_hooks.hooks.webhook",
    "syncd.transports.base",
    "syncd.transports.files.copy_files",
    "syncd.transports.files.receive",
    "syncd.transports.files.stage",
    "syncd.transports.tensors",
]

FOLLOW = """
from explorer_hooks.follower.follower import Follower, FollowOptions
from explorer_hooks.hooks.callback import CallbackHook

loaded = []
options = FollowOptions(stage=sys.argv[2])
with Follower.open(sys.argv[1], CallbackHook(loaded.append), "e0", options) as follower:
    outcome = follower.turn(timeout=60)
assert "torch" not in sys.modules
print(outcome.kind, loaded[0].path.startswith(sys.argv[2]), loaded[0].verified)
"""


def run(program, *argv):
    command = [sys.executable, "-c", BLOCK + program, *argv]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)


def test_torch_cannot_be_imported_in_these_tests():
    assert "No module named 'torch'" in run("import torch").stderr


@pytest.mark.parametrize("module", MODULES)
def test_each_module_of_the_follower_imports_without_torch(module):
    done = run(f"import {module}")
    assert done.returncode == 0, done.stderr


def test_a_version_is_staged_and_loaded_without_torch(tmp_path):
    scene = Scene(tmp_path / "job")
    try:
        scene.publish(1)
        done = run(FOLLOW, scene.root, str(tmp_path / "stage"))
    finally:
        scene.close()
    assert done.stdout.split() == ["applied", "True", "True"], done.stderr
