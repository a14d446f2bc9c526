"""`explorer bench` over a job with a whole step, a delta and a damaged step: figures by hand, and what costs what."""

import json
import shutil
import sys
from glob import glob
from pathlib import Path

import pytest
import torch
from support.documents import checked
from support.fake_engines import FakeVllm
from support.job_file import job_of, write_job
from support.synchronizers import Threads, World

from explorer_hooks.cli.main import run as command_line
from syncd.cli.main import run as syncd
from syncd.protocol.manifest import read_manifest
from trainer.parts.evaluation.watch import evaluation_history

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "arithmetic"))

from problems import problems
from tiny_model import make_model

pytestmark = pytest.mark.slow

TOKENS = 4
EXPLORER = {
    "reward": {"function": "letters:score"},
    "sampling": {"max_tokens": TOKENS},
    "evaluation": {
        "tasks": "held-out.jsonl",
        "limit": 6,
        "every": 0,
        "sets": {
            "drawn": {"tasks": "held-out.jsonl", "limit": 2, "samples": 3, "temperature": 1.0, "correct": 200}
        },
    },
}


def score(text):
    return float(sum(map(ord, text)))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return a job with step 10, step 20 as its changes, and step 30, whose bytes are not those that were sealed."""
    place = tmp_path_factory.mktemp("bench")
    make_model(place / "model", 1)
    model = loaded(place / "model")
    body = model.model
    for step, weights in (
        (10, body.layers[0].mlp.up_proj.weight),
        (20, body.norm.weight[:64]),
        (30, body.norm.weight),
    ):
        weights.data.neg_()
        model.save_pretrained(place / f"export-{step}")
    (place / "job").mkdir()
    world = World(place / "job", Threads())
    try:
        for step in (10, 20, 30):
            delta = ("--delta-from", "10") if step == 20 else ()
            assert syncd(["publish", world.root, str(step), f"{place}/export-{step}", *delta]) == 0
            world.tick()
            assert world.pair() == (1, step)
    finally:
        world.shut()
    assert read_manifest(world.job.disk, world.job.step(20)).kind == "delta"
    (shard,) = glob(f"{place}/job/global_step_30/**/*.safetensors", recursive=True)
    data = bytearray(Path(shard).read_bytes())
    data[-5] ^= 1
    Path(shard).chmod(0o644)
    Path(shard).write_bytes(data)
    (place / "letters.py").write_text(
        "def score(prompt, response, task): return float(sum(map(ord, response)))\n"
    )
    rows = [{"prompt": one.prompt, "answer": one.answer, "id": one.prompt} for one in problems("test")]
    (place / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"dir": "/elsewhere", "source": f"{place}/grpo.toml"}
    tables = job_of(job=own, model={"path": f"{place}/model"}, explorer=EXPLORER)
    write_job(place / "job" / "config.toml", tables)
    return place / "job"


def loaded(directory):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def by_hand(place, directory):
    """Return the mean reward of greedy responses by transformers alone."""
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(place / "model"), loaded(directory)
    rewards = []
    for one in list(problems("test"))[:6]:
        ids = tokenizer(one.prompt, return_tensors="pt")["input_ids"]
        made = model.generate(ids, do_sample=False, max_new_tokens=TOKENS)
        rewards.append(score(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)))
    return sum(rewards) / len(rewards)


def bench(capsys, job, *more):
    """Return the exit code, and the JSON document by step."""
    capsys.readouterr()
    code = command_line(["bench", str(job), "--json", *more])
    said = capsys.readouterr()
    if code:
        return code, said.err
    steps = checked("explorer bench", json.loads(said.out))["steps"]
    return code, {step.pop("step"): step for step in steps}


def lines(job, name="bench"):
    return (job / "explorers" / name / "evaluations.jsonl").read_text().splitlines()


def test_steps_and_the_base_are_measured_once_and_a_damaged_step_costs_itself(job, capsys, tmp_path):
    code, found = bench(capsys, job)
    assert code == 0, found
    assert {step: one["state"] for step, one in found.items()} == {
        0: "measured", 10: "measured", 20: "measured", 30: "damaged"
    }  # fmt: skip
    place, figures = job.parent, {}
    for step, export in ((0, "model"), (10, "export-10"), (20, "export-20")):
        greedy, drawn = found[step]["sets"]
        assert (greedy["set"], drawn["set"], greedy["was_known"]) == ("", "drawn", False)
        assert greedy["reward"] == pytest.approx(by_hand(place, place / export))
        assert (greedy["tasks"], greedy["failed"], greedy["generation"]) == (6, 0, 1)
        assert drawn["pass_at_1"] <= drawn["pass_at_3"] <= 1
        assert drawn["reward"] <= drawn["best_at_3"]
        figures[step] = greedy["reward"]
    assert len(set(figures.values())) == 3, "three different models"
    history = evaluation_history(str(job))
    assert dict(zip(*history.series("eval/reward"), strict=True)) == figures
    assert len(lines(job)) == 6

    code, again = bench(capsys, job)
    assert code == 0
    assert all(its["was_known"] for step in (0, 10, 20) for its in again[step]["sets"])
    assert again[30]["state"] == "damaged"
    assert len(lines(job)) == 6, "nothing is measured twice"

    code, other = bench(
        capsys, job, "--steps", "20", "--no-base", "--again", "--name", "b2", "--set", "drawn"
    )
    assert (code, list(other), len(lines(job, "b2"))) == (0, [20], 1)
    changed = ("--steps", "10", "--no-base", "--explorer.evaluation.limit", "2")
    assert [one["was_known"] for one in bench(capsys, job, *changed)[1][10]["sets"]] == [False, True]

    for export in ("model", "export-10"):
        shutil.copytree(place / export, tmp_path / "other", dirs_exist_ok=True)
    elsewhere = ("--steps", "0", "--base", str(tmp_path / "other"))
    code, base = bench(capsys, job, *elsewhere)
    assert [one["was_known"] for one in base[0]["sets"]] == [False, False], "another model is another base"
    assert base[0]["sets"][0]["reward"] == pytest.approx(figures[10])
    assert [one["was_known"] for one in bench(capsys, job, *elsewhere)[1][0]["sets"]] == [True, True]

    copy = tmp_path / "job"
    shutil.copytree(job, copy)
    shutil.rmtree(copy / "global_step_20")
    code, rest = bench(capsys, copy, "--steps", "10,20")
    assert (code, rest[20]["state"], rest[10]["state"]) == (0, "gone", "measured")
    code, said = bench(capsys, copy, "--steps", "20", "--no-base")
    assert (code, "nothing could be measured; step 20 is gone" in said) == (65, True)


class Server(FakeVllm):
    """vLLM whose responses are the step that it runs."""

    def post_v1_completions(self, query, body):
        with self.lock:
            text = "0" if self.label == "default" else self.label.split(".")[1].partition("-")[0]
        values = {"token_logprobs": [-0.5] * 3, "tokens": ["x"] * 3}
        choice = {"text": text, "token_ids": [1, 1, 1], "logprobs": values, "finish_reason": "length"}
        return {"choices": [choice] * body["n"]}


def test_a_server_loads_each_step_and_one_that_runs_a_step_is_not_the_base(job, capsys, tmp_path):
    shutil.copytree(job, tmp_path / "job", ignore=shutil.ignore_patterns("explorers"))
    server = Server()
    server.started_from = str(job.parent / "model")
    engine = ["--explorer.engine.kind=vllm", f"--explorer.engine.address={server.address}"]
    try:
        code, found = bench(capsys, tmp_path / "job", *engine)
        assert code == 0, found
        means = {step: one["sets"][0]["reward"] for step, one in found.items() if one["sets"]}
        assert means == {0: score("0"), 10: score("10"), 20: score("20")}
        code, found = bench(capsys, tmp_path / "job", "--again", "--steps", "10", *engine)
        assert (code, found[10]["state"], found[0]["state"]) == (0, "measured", "failed")
        assert "--no-base" in found[0]["reason"]
    finally:
        server.stop()


def test_it_prints_a_table_for_each_set(job, capsys):
    capsys.readouterr()
    assert command_line(["bench", str(job), "--steps", "10,30", "--no-base"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "[explorer.evaluation]: 1 response to each task at temperature 0"
    assert out[1].split()[:3] == ["step", "version", "reward"]
    assert out[2].split()[1] == "1.10"
    assert "drawn: 3 responses to each task at temperature 1" in out
    assert out[-1].startswith("step 30 was not measured, damaged: ")


@pytest.mark.parametrize(
    ("more", "code", "what"),
    [
        (["--steps", "ten"], 2, "neither all nor steps"),
        (["--steps", "0", "--no-base"], 65, "nothing could be measured; there is no step to measure"),
        (["--set", "math"], 2, "no evaluation set is called 'math'"),
        (["--config", "none.toml"], 78, "cannot be read"),
        (["--explorer.evaluation.limit", "x"], 78, "is not a whole number"),
        (["--explorer.agent.command", "true"], 78, "explorer bench has agents play nothing"),
    ],
)
def test_what_cannot_be_measured_is_said_with_a_code(job, capsys, more, code, what):
    assert command_line(["bench", str(job), *more]) == code
    assert what in capsys.readouterr().err


def test_a_job_without_a_configuration_needs_one(tmp_path, capsys):
    assert command_line(["bench", str(tmp_path)]) == 78
    assert f"explorer bench {tmp_path} --config grpo.toml" in capsys.readouterr().err
