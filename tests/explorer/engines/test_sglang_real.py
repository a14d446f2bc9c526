"""Real SGLang on the CPU, by the contract of hooks and by what transformers says that it must answer."""

import pytest
from support.engine_process import python_of
from support.probe_contract import RealAnswersProbes
from support.real_bed import applied_next
from support.real_contract import RealEngineContract, TakesWeights
from support.real_deltas import TakesDeltas
from support.real_spans import Groups, NamesVersions, distances
from support.sglang_process import SglangRealBed, sglang
from support.teaching import RealTeaches

PYTHON = python_of("SYNCD_SGLANG_PYTHON", ".venv-sglang/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class TestSglang(
    RealTeaches, NamesVersions, TakesDeltas, TakesWeights, RealAnswersProbes, RealEngineContract
):
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
