"""What a real engine must show of versions by deltas, which a `syncd follow` of its own process loads into it.

The trainer's sender stores bf16 weights: the first version whole, then deltas, with a keyframe with a shortcut after
every few of them. SYNCD_DELTA_VERSIONS is the number of versions.
"""

import contextlib
import copy
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import uuid

import pytest

from explorer_hooks.http_client import HttpClient
from explorer_hooks.run.generation import GroupRequest
from explorer_hooks.run.server_apis import ApiChoice
from explorer_hooks.run.token_versions import parse_spans
from support import small_qwen
from support.cli import command, environment
from support.paths import TESTS
from support.probe_contract import ROWS
from support.proven import answer, probe_of
from support.real_bed import CLOSE, LIMIT, Clients, awaited
from syncd.client.client import Client
from syncd.jobfile.sections import SyncSection
from syncd.protocol.engine_state import EngineState, engine_report_of
from syncd.protocol.layout import Job
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import path_of, read_presence
from syncd.protocol.probe import Probe, write_base_probe
from syncd.protocol.version import engine_label

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("pyarrow", reason="deltas need pyarrow")

from syncd.transports.base import SendContext, StepContent  # noqa: E402
from syncd.transports.files.send import FilesSender  # noqa: E402
from syncd.transports.ranks import Ranks  # noqa: E402

VERSIONS = int(os.environ.get("SYNCD_DELTA_VERSIONS", "40"))
KEYFRAME_EVERY = 4
SHARE = 0.015
"""Of the values, those that a version changes: as many as a learning rate of 1e-6 does, but each by half."""

HEADER = 64 << 10
"""Bytes that are read of a file for its header, and may be read again."""

TROUBLE = {"load_failed", "load_refused", "proof_failed", "shortcut_failed", "stage_copy_damaged"}
"""Events of a follower that none of its loads may have."""


class ChangingTrainer:
    """A trainer of bf16 weights that its explorers get by deltas.

    Args:
        job: The job.
        start: The directory of the model that the engine was started with, seed 0.
    """

    def __init__(self, job, start):
        self.job, self.client = job, Client.open(job.root, "trainer")
        settings = SyncSection(delta="on", keyframe_every=KEYFRAME_EVERY)
        self._sender = FilesSender.open(SendContext(job, Ranks(), settings, self.client))
        self._model = small_qwen.model_of(0)
        write_base_probe(job, probe_of(self._model), start)
        self.models, self.probes, self.manifests = {}, [], []

    def publish(self, step):
        """Train a little, store the step, and return the label that engines are told of it."""
        self._change(step)
        self.probes.append(Probe(ROWS, answer(self._model), "float32", "bfloat16"))
        content = StepContent(lambda: self._model.state_dict().items(), probe=self.probes[-1])
        self._sender.send(step, uuid.uuid4().hex, content)
        self._sender.wait()
        self.manifests.append(read_manifest(self.job.disk, self.job.step(step)))
        label = engine_label((1, step), self.manifests[-1].digest)
        self.models[label] = copy.deepcopy(self._model)
        return label

    def _change(self, seed):
        """Change a few values; all stay values of bf16, so the model in float32 is what the files have."""
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self._model.parameters():
                chosen = torch.rand(weight.shape, generator=draw) < SHARE
                weight.copy_(torch.where(chosen, 1.5 * weight, weight).bfloat16())

    def forms(self):
        """Return how each step was stored."""
        return ["delta" if one.delta else "shortcut" if one.shortcut else "whole" for one in self.manifests]

    def least_change(self):
        """Return by how many nats the probes of neighbouring versions differ at least, at the mean."""
        flat = [torch.tensor(one.logprobs) for one in self.probes]
        return min(float((a - b).abs().mean()) for a, b in itertools.pairwise(flat))

    def close(self):
        self._sender.close()
        self.client.close()


class Labelled:
    """Answers of a real server, with the label that it names for each token.

    Args:
        bed: The engine.
    """

    def __init__(self, bed):
        address = bed.process.address
        self._client = HttpClient(address, token=None, timeout=LIMIT, ask_timeout=LIMIT, missing="")
        self._choice = ApiChoice(self._client, bed.hook_name, "policy", "required")
        self.answers = []

    def ask(self, prompt, wanted):
        """Ask for an answer as `Clients` does, and keep it; it may end before the tokens that were wanted."""
        api, asked = self._choice.api(), GroupRequest(prompt, 1, wanted, 1.0)
        ((response, versions),) = api.parse(self._client.post_any(api.path, api.body(asked)).json, asked)
        self.answers.append((prompt, response, parse_spans(versions, len(response.tokens))))
        return wanted

    def labels(self):
        return {span.label for _, _, spans in list(self.answers) for span in spans}

    def distances(self, models):
        """Return how far each span's log-probs are from transformers' with the weights that its label names."""
        return [
            _distance(models[span.label], prompt, response, span)
            for prompt, response, spans in self.answers
            for span in spans
        ]


def _distance(model, prompt, response, span):
    wanted = small_qwen.expected(model, [*prompt, *response.tokens[: span.end]], span.end)[span.start :]
    found = response.logprobs[span.start : span.end]
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


class FollowedJob:
    """A job with a `syncd watch` and a `syncd follow` over an engine, as processes.

    Args:
        bed: The engine.
        place: An empty directory.
    """

    def __init__(self, bed, place):
        self._place, self._stack = str(place), contextlib.ExitStack()
        os.mkdir(f"{place}/job")
        self.job = Job.at(f"{place}/job")
        self.trainer = ChangingTrainer(self.job, bed.start_directory)
        self._stack.callback(self.trainer.close)
        self._start("watch", *command("watch", self.job.root, "--log-format", "json"))
        hook = ("--hook", f"{bed.hook_name}={bed.process.address}", "--name", "e0", "--retries", "0")
        log = ("--log-level", "debug", "--log-format", "json")
        counted = (sys.executable, f"{TESTS}/programs/counted.py", f"{place}/reads")
        stage = ("--stage", f"{place}/stage")
        self.follower = self._start("follow", *counted, "follow", self.job.root, *hook, *stage, *log)

    def _start(self, name, *argv):
        with open(f"{self._place}/{name}.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment())
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def load(self, step):
        """Publish a step, wait until the engine runs it, and return its label and what the follower says of it."""
        label = self.trainer.publish(step)
        awaited(lambda: self._has_applied(step))
        report = engine_report_of(self._presence().info)
        assert (report.state, report.proof.version) == (EngineState.PROVEN, label)
        return label, report

    def reads_deltas(self):
        """Return whether the follower is there and has said that it reads deltas."""
        with contextlib.suppress(FileNotFoundError):
            return "delta" in self._presence().reads

    def _has_applied(self, step):
        assert self.follower.poll() is None, self.said("follow")[-3:]
        with contextlib.suppress(FileNotFoundError):  # before it has joined
            presence = self._presence()
            report = engine_report_of(presence.info)
            assert report is None or not report.failures, self.said("follow")[-3:]
            return presence.applied == (1, step)

    def _presence(self):
        return read_presence(self.job.disk, path_of(self.job.explorers, "e0"))

    def said(self, name):
        """Return the events of a process."""
        with open(f"{self._place}/{name}.log", encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.startswith("{")]

    def reads(self, step):
        """Return how often the follower has read each byte of a step in the job, by the name of the file."""
        found = {}
        with open(f"{self._place}/reads", encoding="utf-8") as file:
            for path, offset, length in map(json.loads, file):
                if path.startswith(f"{self.job.step(step)}/"):
                    name = path.removeprefix(f"{self.job.step(step)}/")
                    found.setdefault(name, []).extend(range(offset, offset + length))
        return found

    def end_follower(self):
        """End the follower as an operator does; return its events."""
        self.follower.send_signal(signal.SIGTERM)
        assert self.follower.wait(LIMIT) == 0
        return self.said("follow")

    def close(self):
        self._stack.close()


class TakesDeltas:
    """Beds are those of the contract of real engines."""

    def test_versions_by_deltas_are_proven_while_requests_run(self, bed, tmp_path, record_line):
        with contextlib.closing(FollowedJob(bed, tmp_path)) as followed:
            awaited(followed.reads_deltas)
            followed.load(1)
            labelled, loads = Labelled(bed), []
            clients = Clients(labelled.ask, 2), Clients(bed.stream, 2)
            for step in range(2, VERSIONS + 1):
                label, report = followed.load(step)
                loads.append(report)
                assert bed.label() == label
                awaited(lambda label=label: label in labelled.labels())
            streamed = [one.finish() for one in clients][1]
            events = followed.end_follower()
            trainer, figures = followed.trainer, _reads(followed)
        _check_events(events)
        distances = labelled.distances(trainer.models)
        assert max(distances) < CLOSE
        assert trainer.least_change() > max(one.proof.tolerance for one in loads)
        forms = trainer.forms()
        assert forms[0] == "whole"
        assert set(forms[1:]) == {"delta", "shortcut"}
        tokens = sum(len(response.tokens) for _, response, _ in labelled.answers)
        record_line(
            f"{bed.engine}: {VERSIONS} versions, {forms.count('delta')} deltas and {forms.count('shortcut')} "
            f"keyframes with a shortcut, all proven (mean within {max(one.proof.mean for one in loads):.1e}, "
            f"tolerance {loads[-1].proof.tolerance:.1e}, neighbours at least {trainer.least_change():.2f} nats "
            f"apart); {tokens} tokens in {len(labelled.answers)} answers within {max(distances):.1e} nats of "
            f"the version that is named; {streamed} other requests complete"
        )
        record_line(f"{bed.engine}: {figures}")


def _check_events(events):
    """Every version was proven, and made of the stage's copy of the one before."""
    assert TROUBLE.isdisjoint(one["event"] for one in events)
    applied = [one for one in events if one["event"] == "version_applied"]
    assert [one["version"] for one in applied] == [f"1.{step}" for step in range(1, VERSIONS + 1)]
    assert all(one["proven"] and one["source"] == "stage" for one in applied)
    made = [(one["step"], one["base"], one["source"]) for one in events if one["event"] == "delta_applied"]
    assert made == [(step, step - 1, "stage") for step in range(2, VERSIONS + 1)]


def _reads(followed):
    """Compare what the follower read of the job with the containers; return the figures in words."""
    sizes, totals = [], []
    for manifest in followed.trainer.manifests[1:]:
        reads = followed.reads(manifest.step)
        containers = {record.name: record.size for record in manifest.containers}
        assert {name: len(set(reads.get(name, ()))) for name in containers} == containers
        sizes.append(sum(containers.values()))
        totals.append(sum(map(len, reads.values())))
        assert totals[-1] <= sizes[-1] + HEADER
        assert {*reads} == {*containers}
    whole = followed.trainer.manifests[0].whole_size
    return (
        f"{statistics.median(totals):.0f} bytes read of the job for a version (most {max(totals)}), whose "
        f"changes have {statistics.median(sizes):.0f} (most {max(sizes)}) and its whole files {whole}"
    )
