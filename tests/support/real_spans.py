"""What each real engine must show of the versions of tokens while versions are loaded under its requests."""

import threading

from explorer_hooks.http_client import HttpClient
from explorer_hooks.run.generation import BEFORE_THE_FIRST, GeneratorContext, GroupRequest
from explorer_hooks.run.served import ServerGenerator
from explorer_hooks.run.server_apis import ApiChoice
from support import small_qwen
from support.proven import probe_of, write_version
from support.real_bed import CLOSE, LIMIT, applied_next, awaited, seed_of

PROMPT = list(range(40, 70))
ROUNDS = 24
"""Versions that are loaded at most until enough responses have tokens of two: on a busy machine few have."""

ENOUGH = 3


class Groups:
    """Groups that a real server generates one after the other, in a thread, while versions are loaded.

    Args:
        bed: The engine.
        follower: What loads versions into it.
    """

    def __init__(self, bed, follower):
        client = HttpClient(bed.process.address, token=None, timeout=LIMIT, ask_timeout=LIMIT, missing="")
        permitted = lambda: follower.applied or BEFORE_THE_FIRST  # noqa: E731
        self._done = threading.Event()
        context = GeneratorContext(None, follower.running, follower.pair_named, permitted, "", lambda: False)
        choice = ApiChoice(client, bed.hook_name, "policy", "required")
        self._generator = ServerGenerator(client, choice, context, concurrency=3, retries=0, settle=LIMIT)
        self.results = []
        self._thread = threading.Thread(target=self._generate, daemon=True)
        self._thread.start()

    def _generate(self):
        while not self._done.is_set():
            asked = [GroupRequest([*PROMPT, at], 4, 400, 1.0) for at in range(3)]
            self.results += [one for one in self._generator.generate(asked) if one is not None]

    def await_next(self):
        """Wait until another group has come, so that others are under way."""
        known = len(self.results)
        awaited(lambda: len(self.results) > known)

    @property
    def crossed(self):
        """Return the responses with tokens of several versions."""
        return [one for one in self.responses() if len(one.versions.spans) > 1]

    def responses(self):
        return [one for result in self.results for one in result.responses]

    def finish(self):
        self._done.set()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        assert [one.problem for one in self.results if one.problem] == []


def parts(response):
    """Return for each span its version, its first token and the one after its last."""
    spans = response.versions.spans
    ends = [span.start for span in spans[1:]] + [len(response.tokens)]
    return [((one.generation, one.step), one.start, end) for one, end in zip(spans, ends, strict=True)]


def distance(prompt, response, seed, start, end):
    """Return how far log-probs are from transformers' with the weights of a seed, in float32."""
    wanted = small_qwen.expected(seed, [*prompt, *response.tokens[:end]], end)[start:]
    return max(abs(a - b) for a, b in zip(response.logprobs[start:end], wanted, strict=True))


def distances(groups):
    """Return of each span its version and how far it is from the version's weights."""
    found = []
    for result in groups.results:
        for response in result.responses:
            for pair, start, end in parts(response):
                seed = 0 if pair == BEFORE_THE_FIRST else seed_of(pair)
                prompt = [*PROMPT, result.index]
                found.append((pair, start, distance(prompt, response, seed, start, end)))
    return found


class NamesVersions:
    """Beds and jobs are those of the contract of real engines."""

    def test_each_token_has_the_log_prob_of_the_version_that_the_engine_names_for_it(
        self, bed, job, record_line
    ):
        with job.follower(bed.open()) as follower:
            groups = Groups(bed, follower)
            for step in range(1, ROUNDS + 1):
                groups.await_next()
                job.publish(step)
                applied_next(follower, (1, step))
                if len(groups.crossed) >= ENOUGH and step > 2:
                    break
            groups.finish()
        found = distances(groups)
        worst, tokens = max(one for _, _, one in found), sum(len(one.tokens) for one in groups.responses())
        record_line(
            f"{bed.engine}: {tokens} tokens of {len({pair for pair, _, _ in found})} versions in "
            f"{len(groups.responses())} responses, {len(groups.crossed)} of them across a load: log-probs within "
            f"{worst:.1e} nats of the version that is named"
        )
        assert len(groups.crossed) >= ENOUGH
        assert worst < CLOSE
        assert all(one.versions.unproven is None for one in groups.responses())

    def test_only_the_tokens_of_a_version_without_a_proof_are_masked(self, bed, job, record_line):
        with job.follower(bed.open(), retries=0) as follower:
            write_version(job.job, 1, *self._version(1, 1))
            applied_next(follower, (1, 1))
            groups = Groups(bed, follower)
            for step in range(2, ROUNDS + 2):
                groups.await_next()
                write_version(job.job, step, *self._version(step, 99))
                awaited(lambda step=step: job.published() == step)
                outcome = follower.turn(LIMIT)
                assert (outcome.kind, outcome.pair) == ("failed", (1, step))
                if self._masked(groups):
                    break
            groups.await_next()
            groups.await_next()
            groups.finish()
        masked = self._masked(groups)
        record_line(f"{bed.engine}: {masked} tokens of versions whose proof failed, all masked")
        assert masked
        assert self._is_whole(groups.results[0])
        assert self._is_whole(groups.results[-1]), "it began after the engine had proven version 1 again"
        assert max(one for _, _, one in distances(groups)) < CLOSE

    def _version(self, step, probed):
        """Return the weights of a step, and the probe of other ones."""
        return small_qwen.model_of(seed_of((1, step))), probe_of(small_qwen.model_of(seed_of((1, probed))))

    def _masked(self, groups):
        """Return how many tokens are of versions after the first one: all are masked.

        Those of the first one are masked too in a response that ends before the engine has proven it again.
        """
        masked = 0
        for response in groups.responses():
            mask = response.versions.unproven or [False] * len(response.tokens)
            for pair, start, end in parts(response):
                if pair != (1, 1):
                    assert all(mask[start:end])
                    masked += end - start
        return masked

    def _is_whole(self, result):
        """Return whether no token of a group is masked."""
        return not any(response.versions.unproven for response in result.responses)
