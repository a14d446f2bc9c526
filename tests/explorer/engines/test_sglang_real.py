"""Real SGLang on the CPU, by the contract of hooks and by what transformers says that it must answer."""

import shutil
from typing import ClassVar

import pytest
from support.engine_process import python_of
from support.probe_contract import RealAnswersProbes
from support.real_bed import RealBed, applied_next, asked, told
from support.real_contract import RealEngineContract, TakesWeights
from support.real_spans import Groups, NamesVersions, distances
from support.sglang_process import sglang

from explorer_hooks.follower.checksums import Moved
from explorer_hooks.hooks.sglang import SGLangHook

PYTHON = python_of("SYNCD_SGLANG_PYTHON", ".venv-sglang/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class SglangRealBed(RealBed):
    hook_type = SGLangHook
    engine, hook_name, pause_path = "SGLang", "sglang", "/pause_generation"
    cannot: ClassVar = {
        "label before commit": "SGLang takes weights and version in one request",
        "fail_commit": "nothing makes real SGLang fail there at will",
        "stale head": "nothing makes real SGLang leave one",
        "gone": "a start takes a minute: see test_a_restarted_engine_gets_the_newest_version_before_it_is_ready",
        "restart": "a start takes a minute: see test_a_restarted_engine_gets_the_newest_version_before_it_is_ready",
    }

    stays = Moved.UNCHANGED

    def __enter__(self):
        told(self.process.address, "/pause_generation", {"mode": "abort"})
        body = {"model_path": self.start_directory, "weight_version": "default", "flush_cache": True}
        told(self.process.address, "/update_weights_from_disk", body)
        told(self.process.address, "/continue_generation", {})
        return self

    def answer(self, prompt, count=8):
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
            "return_logprob": True,
        }
        found = told(self.process.address, "/generate", body)["meta_info"]["output_token_logprobs"]
        return [one[1] for one in found], [one[0] for one in found]

    def stream(self, prompt, count, begun=None):
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 1, "max_new_tokens": count, "ignore_eos": True},
            "stream": True,
        }
        return self.read_stream("/generate", body, begun)["meta_info"]["completion_tokens"]

    def is_paused(self):
        return asked(self.process.address, "GET", "/ready")[0] == 503

    def label(self):
        return asked(self.process.address, "GET", "/model_info")[1]["weight_version"]

    def fail_load(self, target):
        """Take the directory away: of all failures the one that does not end real SGLang."""
        shutil.rmtree(target.path)

    def inject(self, fault):
        assert fault == "label without load"
        self.hook._reload = lambda _, label: self.hook._set_engine_label(label)

    def load_stale(self, hook, target):
        body = {"model_path": target.path, "weight_version": target.label, "flush_cache": False}
        told(self.process.address, "/pause_generation", {"mode": "retract"})
        told(self.process.address, "/update_weights_from_disk", body)
        told(self.process.address, "/continue_generation", {})

    def pause(self):
        told(self.process.address, "/pause_generation", {"mode": "retract"})


class TestSglang(NamesVersions, TakesWeights, RealAnswersProbes, RealEngineContract):
    bed_type = SglangRealBed

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, start_directory, tmp_path_factory):
        engine = sglang(PYTHON, start_directory, tmp_path_factory.mktemp("sglang") / "log")
        engine.start()
        yield engine
        engine.kill()

    def test_a_pause_in_place_with_old_keys_and_values_names_the_versions_too(self, bed, job, record_line):
        """Tokens behind the load are of new weights over old keys and values: no version gives their log-probs."""
        bed.settings = lambda: {"pause": "in_place", "flush_cache": "false"}
        with job.follower(bed.open()) as follower:
            groups = Groups(bed, follower)
            for step in range(1, 9):
                groups.await_next()
                job.publish(step)
                applied_next(follower, (1, step))
                if len(groups.crossed) >= 3:
                    break
            groups.finish()
        first = [one for _, start, one in distances(groups) if start == 0]
        later = [one for _, start, one in distances(groups) if start]
        record_line(
            f"SGLang, in_place: first spans within {max(first):.1e} nats, later ones within {max(later):.1e}"
        )
        assert len(groups.crossed) >= 3
