"""Servers that draw responses to prompts of tokens, in the formats of vLLM 0.32.0 and SGLang 0.5.23."""

import random

from support.fake_servers import Answer, FakeServer

DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
MISSING = "2 validation errors: body.token_ids: Field required; body.sampling_params: Field required"


def drawn(prompt, count, most):
    """Return the token ids of each response to a prompt: the same for the same prompt."""
    chance = random.Random(str(prompt))
    return [[chance.randrange(100) for _ in range(chance.randint(1, most))] for _ in range(count)]


def logprob(token):
    return -0.01 * token


def text_of(ids):
    return " ".join(map(str, ids))


class Completing(FakeServer):
    """Answers completions as vLLM does; what says which version chose which token is off, as it is by default."""

    model = "policy"

    def get_v1_models(self, query, body):
        return {"object": "list", "data": [{"id": self.model, "object": "model"}]}

    def post_v1_completions(self, query, body):
        responses = drawn(body["prompt"], body["n"], body["max_tokens"])
        choices = [self.completion(body, index, ids) for index, ids in enumerate(responses)]
        return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": choices}

    def completion(self, body, index, ids):
        return {
            "index": index,
            "text": text_of(ids),
            "logprobs": {
                "text_offset": [0] * len(ids),
                "token_logprobs": [logprob(one) for one in ids],
                "tokens": [str(one) for one in ids],
                "top_logprobs": [{str(one): logprob(one)} for one in ids],
            },
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "prompt_logprobs": None,
        }

    def post_inference_v1_generate(self, query, body):
        raise Answer(403, {"error": {"message": DISABLED, "type": "PermissionDeniedError", "code": 403}})


class Generating(Completing):
    """Names the version of each token: `spans` returns what it says of a response of so many tokens."""

    kind = path = ""

    def spans(self, length):
        return [{"version": "default", "start": 0, "end": length}]


class GeneratingVllm(Generating):
    """vLLM with `--enable-scale-out`."""

    kind, path = "vllm", "/inference/v1/generate"

    def post_inference_v1_generate(self, query, body):
        if "token_ids" not in body or "sampling_params" not in body:
            raise Answer(400, {"error": {"message": MISSING, "type": "Bad Request", "code": 400}})
        asked = body["sampling_params"]
        responses = drawn(body["token_ids"], asked["n"], asked["max_tokens"])
        return {
            "request_id": "generate-tokens-1",
            "model": body["model"],
            "usage": {"prompt_tokens": len(body["token_ids"]), "prompt_tokens_details": None},
            "prompt_logprobs": None,
            "prompt_token_ids": body["token_ids"] if body.get("return_token_ids") else None,
            "output_mode": body["output_mode"],
            "choices": [self.choice(index, ids) for index, ids in enumerate(responses)],
        }

    def choice(self, index, ids):
        content = [{"token": str(one), "logprob": logprob(one), "bytes": [48]} for one in ids]
        content = [{**one, "top_logprobs": [one]} for one in content]
        return {
            "index": index,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": self.spans(len(ids)),
            "text": text_of(ids),
            "logprobs": {"content": content},
        }


class GeneratingSglang(Generating):
    """SGLang: `/generate` answers several responses by a list, one by an object."""

    kind, path = "sglang", "/generate"

    def post_generate(self, query, body):
        asked, prompt = body["sampling_params"], body["input_ids"]
        found = [self.result(prompt, ids) for ids in drawn(prompt, asked["n"], asked["max_new_tokens"])]
        return found if asked["n"] > 1 else found[0]

    def result(self, prompt, ids):
        spans = self.spans(len(ids))
        told = {
            "id": "1538eb99adc1473791d3e726735a4b2b",
            "finish_reason": {"type": "length", "length": len(ids)},
            "prompt_tokens": len(prompt),
            "weight_version": "default",
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [[logprob(one), one, None] for one in ids],
            "output_token_logprobs_length": len(ids),
            "completion_tokens": len(ids),
        }
        named = {} if spans is None else {"weight_versions": spans}
        return {"text": text_of(ids), "output_ids": ids, "meta_info": told | named}
