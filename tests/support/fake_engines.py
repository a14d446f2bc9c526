"""Engines that keep what real ones were measured to do: half loads, stale caches, labels lost at a restart, death.

Each answers a prompt of text with a fingerprint of the weights that it was computed with, and a prompt of tokens with
log-probs (`fake_answers`). A prompt that was answered before is answered from the cache until somebody resets it, as
by real engines; a request for the log-probs of its prompt never is.
"""

import functools
import hashlib
import json
import os
import struct
import threading

from support import fake_answers, small_qwen
from support.fake_answers import fingerprint
from support.fake_servers import Answer, FakeServer, VanishError

START = {"model.a": b"start-a", "model.b": b"start-b"}
MAX_REQUEST = 2.0
FAULTS = ("stale head", "stale prefix cache", "label without load")
"""Faults that no status code and no label shows: a head that stays as it was, a cache that a reset leaves as it was,
and a load that is confirmed and does nothing."""


def read_shard(path):
    """Return the bytes of each tensor of a file with its shape."""
    with open(path, "rb") as file:
        raw = file.read()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        data = raw[8 + length + start : 8 + length + end]
        found[name] = (tuple(entry["shape"]), data, len(data) == end - start)
    return found


def fingerprint_of(directory):
    """Return the fingerprint of an engine that runs exactly what is in a directory."""
    weights = {}
    for name in sorted(os.listdir(directory)):
        if name.endswith(".safetensors"):
            weights |= {key: data for key, (_, data, _) in read_shard(f"{directory}/{name}").items()}
    return fingerprint(weights)


class FakeEngine(FakeServer):
    """What vLLM and SGLang have in common.

    Attributes:
        started_from: The directory that it says that it was started from.
        start_weights: The weights that it has after a start.
        fault: Which of `FAULTS` it has.
        replicas: How many data-parallel replicas it has.
        stale: The weights of each replica that keeps them whatever is loaded.
        packed: Parameters of which it gives no checksum.
    """

    replicas = 1
    packed = frozenset()
    started_from = "/start"
    start_weights = START
    fault = ""
    longest = fake_answers.LONGEST

    def __init__(self, token=None):
        self.boot()
        self.fail_next_load = False
        self.shapes = None
        super().__init__(token)

    def boot(self):
        """Set everything to what it is at a start."""
        self.weights = dict(self.start_weights)
        self.label = "default"
        self.running = threading.Event()
        self.running.set()
        self.cache = {}
        self.damaged = False
        self.versions_at = []
        self.stale = {}

    @property
    def paused(self):
        return not self.running.is_set()

    def take(self, directory):
        """Read a directory into the weights; what was written before an error stays."""
        whole = {}
        if self.damaged:
            raise RuntimeError("parameters are on the meta device")
        if not os.path.isdir(directory):
            raise FileNotFoundError(f"cannot find model weights with `{directory}`")
        names = [name for name in sorted(os.listdir(directory)) if name.endswith(".safetensors")]
        if not names:
            raise FileNotFoundError(f"cannot find model weights with `{directory}`")
        if self.fault == "label without load":
            return
        head = next(name for name in ("lm_head.weight", "model.a", *self.weights) if name in self.weights)
        before = self.weights[head]
        for name in names:
            for tensor, (shape, data, complete) in read_shard(f"{directory}/{name}").items():
                if not complete or self.fail_next_load:
                    self.fail_next_load = False
                    raise ValueError("incomplete metadata, file not fully covered")
                if self.shapes is not None and self.shapes.get(tensor, shape) != shape:
                    self.damaged = True
                    raise AssertionError(f"shape mismatch for {tensor}")
                self.weights = {**self.weights, tensor: data} if whole else {tensor: data}
                whole[tensor] = shape
        self.shapes = whole
        if self.fault == "stale head":
            self.weights = {**self.weights, head: before}

    def held(self):
        """Return the weights of the replica that was asked; without a rank it is the first."""
        return self.stale.get(self.rank(), self.weights)

    def checksums(self, rank):
        """Return name and checksum of each parameter of a replica."""
        for name, data in self.stale.get(rank, self.weights).items():
            yield name, hashlib.sha256(b"" if name in self.packed else data).hexdigest()

    def reset_cache(self):
        if self.fault != "stale prefix cache":
            self.cache.clear()

    def answered(self, prompt):
        if not self.running.wait(MAX_REQUEST):
            raise Answer(503, {"error": "paused"})
        with self.lock:
            return self.cache.setdefault(prompt, fingerprint(self.weights))

    def generated(self, prompt):
        """Return the token after a prompt of tokens, and its log-prob, by the weights that the cache has for it."""
        self._check(prompt)
        with self.lock:
            weights = self.cache.setdefault((self.rank(), *prompt), self.held())
        return fake_answers.next_token(weights, prompt)

    def evaluated(self, prompt):
        """Return the log-prob of each token after the first of a prompt; no cache is read."""
        self._check(prompt)
        return fake_answers.log_probs(self.held(), prompt)

    def followed(self, prompt, tokens):
        """Return the log-prob of each of some tokens after a prompt; no cache is read."""
        self._check(prompt)
        return fake_answers.following(self.held(), prompt, tokens)

    def _check(self, prompt):
        if not self.running.wait(MAX_REQUEST):
            raise Answer(503, {"error": "paused"})
        if len(prompt) >= self.longest:
            raise _wrong(400, f"This model's maximum context length is {self.longest} tokens.")


def end_of_vllm(server):
    """End as vLLM does that serves adapters of a head and is asked for the log-probs of a prompt."""
    server.stop_soon()
    raise _wrong(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")


class FakeVllm(FakeEngine):
    """vLLM in development mode.

    Attributes:
        serves_adapters: Whether it was started with `--enable-lora`.
        moves_experts: Whether it was started with `--enable-eplb`.
    """

    version = "0.32.0"
    serves_adapters = moves_experts = False
    dev_mode = True
    blocked_cache = False

    def routed(self, method, target, body):
        dev = ("/pause", "/resume", "/is_paused", "/collective_rpc", "/weight", "/update_w", "/reset_prefix")
        if not self.dev_mode and target.startswith((*dev, "/server_info")):
            raise Answer(404, {"detail": "Not Found"})
        return super().routed(method, target, body)

    def get_health(self, query, body):
        return b""

    def get_version(self, query, body):
        return {"version": self.version}

    def get_v1_models(self, query, body):
        adapter = {"id": "another", "root": "/adapter", "parent": "policy"}
        card = {"id": "policy", "root": self.started_from, "parent": None, "max_model_len": self.longest}
        return {"data": [adapter, card]}

    def get_server_info(self, query, body):
        parts = {
            "model_config": {"dtype": "torch.float32", "quantization": None},
            "cache_config": {"block_size": 16},
            "parallel_config": {"data_parallel_size": self.replicas, "enable_eplb": self.moves_experts},
            "lora_config": {"max_loras": 4} if self.serves_adapters else None,
        }
        return {"vllm_config": parts}

    def rank(self):
        return int(self.request.headers.get("X-data-parallel-rank", 0))

    def post_weight_checker(self, query, body):
        assert body == {"action": "checksum"}
        found = {
            f"dp{rank}:pp0:pcp0:tp0:{name}": checksum
            for rank in range(self.replicas)
            for name, checksum in self.checksums(rank)
        }
        return {"checksums": found}

    def get_is_paused(self, query, body):
        return {"is_paused": self.paused}

    def get_weight_info(self, query, body):
        return {"weight_version": self.label}

    def post_pause(self, query, body):
        if query["mode"] not in {"keep", "wait", "abort"}:
            raise Answer(400, {"error": f"Invalid pause mode: {query['mode']}"})
        self.running.clear()
        return {"status": "paused"}

    def post_resume(self, query, body):
        self.running.set()
        return {"status": "resumed"}

    def post_collective_rpc(self, query, body):
        assert body["method"] == "reload_weights"
        try:
            self.take(body["kwargs"]["weights_path"])
        except Exception as error:
            raise Answer(
                500, {"error": {"message": f"{error}", "type": "InternalServerError", "code": 500}}
            ) from error
        return {"results": [None]}

    def post_update_weight_version(self, query, body):
        self.versions_at.append((body["new_version"], fingerprint(self.weights)))
        self.label = body["new_version"]
        return {"success": True, "new_version": self.label}

    def post_reset_prefix_cache(self, query, body):
        if self.blocked_cache and query.get("reset_running_requests") != "true":
            return {"success": False}
        self.reset_cache()
        return {"success": True}

    def post_v1_completions(self, query, body):
        if isinstance(body["prompt"], str):
            return {"choices": [{"text": self.answered(body["prompt"])}]}
        end = self.end if self.serves_adapters else None
        return completed(body, self.generated, self.evaluated, self.followed, end)

    end = end_of_vllm


class FakeSglang(FakeEngine):
    """SGLang; a load that fails after the first tensor ends the whole server."""

    version = "0.5.23"
    tells_readiness = True
    survives = False
    loaded_from = ""

    def boot(self):
        super().boot()
        self.loaded_from = ""

    def get_model_info(self, query, body):
        return {"model_path": self.loaded_from or self.started_from, "weight_version": self.label}

    def get_server_info(self, query, body):
        known = {
            "model_path": self.started_from,
            "internal_states": [{}],
            "dtype": "float32",
            "quantization": None,
            "dp_size": self.replicas,
        }
        return {"version": self.version, **known}

    knows_replicas = True

    def rank(self):
        return self.request.rank

    def post_weights_checker(self, query, body):
        assert body == {"action": "checksum"}
        ranks = [
            {
                "checksums": dict(self.checksums(rank)),
                "parallelism_info": [{"role": "target", "dp_rank": rank}],
            }
            for rank in range(self.replicas)
        ]
        return {"success": True, "message": "Success.", "ranks": ranks}

    def get_v1_models(self, query, body):
        return {"data": [{"id": "policy", "root": "policy", "parent": None, "max_model_len": self.longest}]}

    def get_ready(self, query, body):
        if not self.tells_readiness:
            raise Answer(404, {"detail": "Not Found"})
        raise Answer(503 if self.paused else 200)

    def post_pause_generation(self, query, body):
        self.running.clear()
        return {"status": "ok"}

    def post_continue_generation(self, query, body):
        self.running.set()
        return {"status": "ok"}

    def post_update_weights_from_disk(self, query, body):
        try:
            self.take(body["model_path"])
        except FileNotFoundError as error:
            return self._failed(f"Failed to get weights iterator: {error}.")
        except Exception as error:
            if self.survives:
                return self._failed(f"Failed to update weights: {error}.\nRolling back to original weights.")
            self.stop_soon()
            raise VanishError from error
        self.versions_at.append((body["weight_version"], fingerprint(self.weights)))
        self.label, self.loaded_from = body["weight_version"], body["model_path"]
        if body["flush_cache"]:
            self.reset_cache()
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def post_update_weight_version(self, query, body):
        assert body["abort_all_requests"] is False
        self.label = body["new_version"]
        return {"success": True}

    def _failed(self, message):
        raise Answer(400, {"success": False, "message": message, "num_paused_requests": 0})

    def post_generate(self, query, body):
        if "text" in body:
            return {"text": self.answered(body["text"])}
        self.request.rank = body.get("routed_dp_rank", 0) if self.knows_replicas else 0
        prompts = body["input_ids"]
        if not isinstance(prompts[0], list):
            return self._generation(body, prompts)
        return [self._generation(body, prompt) for prompt in prompts]

    def _generation(self, body, prompt):
        if max(prompt) >= fake_answers.VOCABULARY:
            self.stop_soon()  # real SGLang looks the token up without a check
            raise VanishError
        answer = generation(body, prompt, self.generated, self.evaluated)
        answer["meta_info"]["weight_version"] = self.label
        if self.replicas > 1:
            answer["meta_info"]["dp_rank"] = self.request.rank
        return answer


def generation(body, prompt, generate, evaluate):
    """Return what SGLang answers to a prompt of tokens; the arguments are those of `completed`."""
    token, found = generate(prompt)
    said = {"prompt_tokens": len(prompt), "input_token_logprobs": []}
    if body.get("logprob_start_len") == 0:
        evaluated = [None, *evaluate(prompt)]
        said["input_token_logprobs"] = [
            [one, token, None] for one, token in zip(evaluated, prompt, strict=True)
        ]
    said["output_token_logprobs"] = [[found, token, None]]
    return {"text": f"<{token}>", "output_ids": [token], "meta_info": said}


class FakeAdapters(FakeServer):
    """vLLM with adapters that are loaded at run time."""

    base = "policy-base"
    base_root = "/start"
    enabled = True
    tells_use = True
    start_weights = START
    fault = ""
    replicas = 1

    def __init__(self, token=None):
        self.fail_next_load = False
        self.boot()
        super().__init__(token)

    def boot(self):
        self.adapters = {}
        self.merged = {}
        self.used = {}
        self.stale = []
        self.asked_ranks = []

    def get_v1_models(self, query, body):
        cards = [{"id": self.base, "root": self.base_root, "parent": None}]
        loaded = [
            {"id": name, "root": path, "parent": self.base} for name, (path, _) in self.adapters.items()
        ]
        return {"data": cards + loaded}

    def get_metrics(self, query, body):
        if not self.tells_use:
            raise Answer(404, {"detail": "Not Found"})
        lines = ["# HELP vllm:lora_requests_info Running stats on lora requests."]
        for at, (running, waiting) in enumerate([*self.stale, (",".join(self.used), "")]):
            labels = f'max_lora="4",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
            lines.insert(1, f"vllm:lora_requests_info{{{labels}}} {1.76e9 + at}")
        lines += [f'vllm:num_requests_running{{engine="{rank}"}} 0.0' for rank in range(self.replicas)]
        return "\n".join(lines).encode()

    def post_v1_load_lora_adapter(self, query, body):
        if not self.enabled:
            raise Answer(404, {"detail": "Not Found"})
        name, path = body["lora_name"], body["lora_path"]
        if not name or not path:
            raise _wrong(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if name in self.adapters and not body.get("load_inplace"):
            raise _wrong(400, f"The lora adapter '{name}' has already been loaded.")
        if self.fail_next_load:
            self.fail_next_load = False
            raise _wrong(500, "LoRA rank 64 is greater than max_lora_rank 16.")
        if not os.path.isfile(f"{path}/adapter_model.safetensors"):
            raise _wrong(404, f"No adapter found for {path}")
        self.take(name, path)
        return b"Success"

    def take(self, name, path):
        """Serve the adapter of a directory under a name."""
        self.adapters[name] = (path, fingerprint_of(path))
        self.merged[name] = self.start_weights if self.fault == "label without load" else self._with(path)

    def _with(self, path):
        """Return the weights with an adapter."""
        if fake_answers.EMBEDDING in self.start_weights:
            return small_qwen.weights_with_adapter(self.start_weights, path)
        return {**self.start_weights, "adapter": fingerprint_of(path).encode()}

    def post_v1_unload_lora_adapter(self, query, body):
        if self.adapters.pop(body["lora_name"], None) is None:
            raise _wrong(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        return b"Success"

    def post_v1_completions(self, query, body):
        name = body.get("model", self.base)
        if not isinstance(body["prompt"], str) and name in {self.base, *self.adapters}:
            self.asked_ranks.append(self.request.headers.get("X-data-parallel-rank"))
            weights = self.merged.get(name, self.start_weights)
            generate = functools.partial(fake_answers.next_token, weights)
            evaluate = functools.partial(fake_answers.log_probs, weights)
            follow = functools.partial(fake_answers.following, weights)
            return completed(body, generate, evaluate, follow, self.end)
        if body["model"] == self.base:
            return {"choices": [{"text": fingerprint(START)}]}
        if body["model"] not in self.adapters:
            raise _wrong(404, f"The model `{body['model']}` does not exist.")
        return {"choices": [{"text": self.adapters[body["model"]][1]}]}

    end = end_of_vllm


def completed(body, generate, evaluate, follow, end=None):
    """Return what vLLM answers to prompts of tokens.

    Args:
        body: The request.
        generate: Returns the token after a prompt, and its log-prob.
        evaluate: Returns the log-prob of each token after the first of a prompt.
        follow: Returns the log-prob of each of some tokens after a prompt.
        end: What a request for the log-probs of a prompt does to the server.
    """
    prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
    answers = (generate, evaluate, follow, end)
    choices = [_choice(body, at, prompt, *answers) for at, prompt in enumerate(prompts)]
    return {"choices": choices}


def _choice(body, at, prompt, generate, evaluate, follow, end):
    if (largest := max([*prompt, *body.get("logprob_token_ids", ())])) >= fake_answers.VOCABULARY:
        raise _wrong(400, f"Token id {largest} is out of vocabulary")
    choice = {"index": at, "text": "", "finish_reason": "length", "prompt_logprobs": None}
    if "prompt_logprobs" in body:
        if end is not None:
            end()
        found = zip(prompt[1:], evaluate(prompt), strict=True)
        entries = [{str(token): {"logprob": one, "rank": 1, "decoded_token": "x"}} for token, one in found]
        return choice | {"prompt_logprobs": [None, *entries]}
    if "logprob_token_ids" in body:
        asked = body["logprob_token_ids"]
        assert len(asked) <= 128
        assert body["cache_salt"]
        top = {f"token_id:{token}": one for token, one in zip(asked, follow(prompt, asked), strict=True)}
        return choice | {"logprobs": {"top_logprobs": [top]}}
    token, found = generate(prompt)
    if body.get("return_token_ids"):
        choice["token_ids"] = [token]
    if "logprobs" in body:
        choice["logprobs"] = {"token_logprobs": [found], "tokens": [f"<{token}>"], "text_offset": [0]}
    return choice


def _wrong(status, message):
    return Answer(status, {"error": {"message": message, "type": "BadRequestError", "code": status}})
