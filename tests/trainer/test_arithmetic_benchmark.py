"""The benchmark of learning: what it makes of figures, and that its files are ones that the trainer takes."""

import json
import os
import sys

import pytest
import tomli_w

from trainer.config.load import load_config
from trainer.stages import load_stages

BENCHMARKS = os.path.join(os.path.dirname(__file__), "..", "..", "benchmarks")
sys.path[:0] = [BENCHMARKS, os.path.join(BENCHMARKS, "..", "examples", "arithmetic")]

import explorer  # noqa: E402
import learning  # noqa: E402
from learning_report import ASYNC, LORA, ON_POLICY, PPO, draw, figures_of, noise_of, report, targets  # noqa: E402

STEPS = 20


def run_of(start, end, age=0.0):
    rewards = [start] * 5 + [end] * 15
    figures = {"steps": STEPS, "rewards": rewards, "ages": [age] * STEPS, "age_max": age, "seconds": 60.0}
    return {**figures, "accuracy": [[0, 0.5], [STEPS, 0.75]]}


def seeds(*ends, start=0.5, rise=0.3, ages=(0.0, 1.0)):
    """Return figures of seeds whose asynchronous runs end by so much higher than the others."""
    return {
        seed: {
            ON_POLICY: run_of(start, start + rise, ages[0]),
            ASYNC: run_of(start, start + rise + end, ages[1]),
        }
        for seed, end in enumerate(ends, 1)
    }


def missed(found):
    return [target.what for target in targets(found) if not target.met]


def test_runs_that_learn_alike_meet_all_targets():
    assert missed(seeds(0.02, -0.01, 0.0)) == []


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (seeds(0.0, 0.0, rise=0.14), "rise"),
        (seeds(-0.06, -0.06, -0.06), "async less"),
        (seeds(0.06, 0.06, 0.06), "async less"),
        (seeds(0.0, ages=(1.0, 1.0)), "oldest rollout"),
        (seeds(0.0, ages=(0.0, 0.0)), "mean age"),
    ],
)
def test_a_missed_target_is_named(found, what):
    (target,) = missed(found)
    assert what in target
    assert report(found, 128).count("MISSED") == 1


def test_one_seed_that_does_not_learn_misses_the_target():
    found = seeds(0.0, 0.0)
    found[3] = {ON_POLICY: run_of(0.5, 0.55), ASYNC: run_of(0.5, 0.55, 1.0)}
    assert missed(found) == ["least rise of the reward, on-policy"]


@pytest.mark.parametrize(("name", "what"), [(PPO, "PPO with a critic"), (LORA, "with an adapter")])
def test_runs_beside_have_a_target_of_their_own(tmp_path, name, what):
    found = {seed: {**runs, name: run_of(0.5, 0.5 + 0.1 * seed)} for seed, runs in seeds(0.0, 0.0).items()}
    assert missed(found) == [f"least rise of the reward, {what}"]
    assert report(found, 128).count(f"| {name} |") == 2
    draw(found, tmp_path / "curves.png")


def test_without_asynchronous_runs_their_targets_do_not_apply():
    found = {seed: {ON_POLICY: runs[ON_POLICY]} for seed, runs in seeds(0.0, 0.0).items()}
    assert missed(found) == []
    assert "async" not in report(found, 128)


def test_noise_is_two_standard_errors_with_a_floor():
    assert noise_of([0.1]) == noise_of([0.0, 0.01, 0.0]) == 0.05
    assert noise_of([-0.1, 0.0, 0.1]) == pytest.approx(2 * 0.1 / 3**0.5)


def test_figures_of_a_run_come_from_metrics_and_explorer_files(tmp_path):
    steps = [
        {
            "step": step,
            "metrics": {
                "critic/score/mean": step / 10,
                "experience/age_mean": 0.5,
                "experience/age_max": step,
            },
        }
        for step in (1, 2, 3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    for name, versions in (("e0", {0: 0.1, 2: 0.2}), ("e1", {0: 0.1, 1: 0.3})):
        lines = [{"generation": 1, "step": step, "accuracy": value} for step, value in versions.items()]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = [tmp_path / "e0.jsonl", tmp_path / "e1.jsonl"]
    assert figures_of(tmp_path, paths, 3) == {
        "steps": 3,
        "rewards": [0.1, 0.2, 0.3],
        "ages": [0.5] * 3,
        "age_max": 3.0,
        "accuracy": [(0, 0.1), (1, 0.3), (2, 0.2)],
    }
    with pytest.raises(ValueError, match="3 of 4 steps"):
        figures_of(tmp_path, paths, 4)


def test_curves_are_drawn_as_png(tmp_path):
    draw(seeds(0.0, 0.01), tmp_path / "new" / "curves.png")
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_generated_files_and_commands_are_accepted_by_trainer_and_explorer(tmp_path, monkeypatch):
    run, imitation = learning.Run(tmp_path, seed=2, steps=STEPS), tmp_path / "model"
    (tmp_path / "staged.toml").write_text(tomli_w.dumps(run.staged(tmp_path)))
    (tmp_path / "free.toml").write_text(tomli_w.dumps(run.free(tmp_path, imitation)))
    sft, grpo = (stage.config for stage in load_stages(str(tmp_path / "staged.toml"), ()).stages)
    free = load_config(str(tmp_path / "free.toml"), ())
    assert (sft.algorithm.name, sft.data.sft_path) == ("sft", f"{tmp_path}/base/sft.jsonl")
    assert grpo.trainer.total_steps == free.trainer.total_steps == STEPS
    assert free.algorithm == grpo.algorithm
    (tmp_path / "ppo.toml").write_text(tomli_w.dumps(run.with_critic(tmp_path, imitation)))
    ppo = load_config(str(tmp_path / "ppo.toml"), ())
    assert (ppo.algorithm.advantage, ppo.critic.enabled, ppo.sync) == ("gae", True, grpo.sync)
    (tmp_path / "lora.toml").write_text(tomli_w.dumps(run.with_adapter(tmp_path, imitation)))
    lora = load_config(str(tmp_path / "lora.toml"), ())
    assert (lora.model.publishes_adapters, lora.model.path, lora.sync) == (True, str(imitation), grpo.sync)
    assert (free.model.path, free.sync.style) == (str(imitation), "fully_async")
    command = run.explorer(tmp_path / "job", tmp_path, "e1", imitation, ahead=1, explorers=2)
    monkeypatch.setattr(sys, "argv", command[1:])
    options = explorer._options()
    assert options.groups * options.batches_per_step == grpo.data.groups == free.data.groups
    assert options.group_size == grpo.data.group_size == free.data.group_size
