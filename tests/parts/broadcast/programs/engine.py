"""An engine behind HTTP whose workers' group is real: routes and answers as vLLM 0.32 and SGLang 0.5.23 have them.

engine.py KIND MODEL PORT

It generates with a transformers model and says of itself at GET /state what its weights are. A group over NCCL is one
over gloo here, behind NCCL's name. POST /fault tells it what goes wrong next:
{"at": "group" | "update", "what": "refuse" | a signal, "after": updates before that}.
"""

import base64
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import vllm_stub
from as_if_nccl import OverGloo
from receive import digest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from explorer_hooks.run.generation import GroupRequest
from explorer_hooks.run.local import draw, sequence_limits

LONG = 60.0
AS_NCCL = "as_nccl"
"""A backend for the device of NCCL: torch's code around it is the same."""


class RefusedError(Exception):
    """What is asked for is answered with an error."""


class Engine:
    """What both kinds have in common.

    Args:
        directory: What it is started from.
    """

    def __init__(self, directory):
        self.directory = directory
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.label, self.running, self.groups, self.updates = "default", threading.Event(), {}, 0
        self.running.set()
        self.is_open = False
        self.fault, self.heard, self.ways = {}, [], set()
        self.lock = threading.Lock()
        self.draws = torch.Generator().manual_seed(1)

    def answer(self, method, path, body):
        self.heard.append(path)
        route = getattr(self, f"{method.lower()}_{path.strip('/').replace('/', '_')}", None)
        if route is None:
            return 404, {"detail": "Not Found"}
        try:
            return 200, route(body)
        except RefusedError as error:
            return 400, {"success": False, "message": str(error)}
        except Exception as error:  # noqa: BLE001 - as servers do
            return 500, {"error": {"message": f"{type(error).__name__}: {error}"}}

    def strike(self, at):
        """Let the fault strike that was ordered for this place."""
        if self.fault.get("at") != at:
            return
        self.fault["after"] = self.fault.get("after", 0) - 1
        if self.fault["after"] >= 0:
            return
        what, self.fault = self.fault["what"], {}
        if what == "refuse":
            raise RefusedError("told to refuse")
        os.kill(os.getpid(), getattr(signal, what))

    def fill(self, tensors):
        with self.lock:
            unknown = self.model.load_state_dict(dict(tensors), strict=False).unexpected_keys
        if unknown:
            raise RuntimeError(f"unknown: {unknown}")

    def read(self, directory):
        for name in sorted(os.listdir(directory)):
            if name.endswith(".safetensors"):
                self.fill(load_file(f"{directory}/{name}"))

    def post_fault(self, body):
        self.fault = body
        return {}

    def post_reset(self, body):
        self.read(self.directory)
        self.label, self.fault, self.ways = "default", {}, set()
        self.running.set()
        return {}

    def get_state(self, body):
        return {
            "digest": digest(self.model),
            "label": self.label,
            "paused": not self.running.is_set(),
            "groups": len(self.groups),
            "open": self.is_open,
            "updates": self.updates,
            "heard": self.heard,
            "ways": sorted(self.ways),
        }

    def get_v1_models(self, body):
        return {"data": [{"id": "policy", "root": self.directory, "parent": None}]}

    def post_update_weight_version(self, body):
        self.label = body["new_version"]
        return {"success": True, "new_version": self.label}

    def post_v1_completions(self, body):
        asked = GroupRequest(body["prompt"], body["n"], body["max_tokens"], body["temperature"])
        return {"choices": [choice(one) for one in self.drawn(asked)[0]]}

    def drawn(self, asked):
        """Return the responses to a prompt, and the label of the weights that chose all of their tokens."""
        while self.running.wait(LONG):
            with self.lock:
                if self.running.is_set():
                    ends = sequence_limits(self.model, None)
                    return draw(self.model, ends, [asked], self.draws, lambda: False)[0], self.label
        raise RuntimeError("paused for too long")


def broadcast(group, tensor):
    """Begin to receive a tensor, past torch's choice of a backend by the device: here NCCL's is that of "cuda"."""
    (device,) = group._device_types if len(group._device_types) == 1 else (torch.device("cpu"),)
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return group._get_backend(device).broadcast([tensor], options)


def choice(drawn):
    return {
        "text": "",
        "token_ids": drawn.tokens,
        "logprobs": {"token_logprobs": drawn.logprobs},
        "finish_reason": "length",
    }


def result(drawn, prompt_tokens, label):
    pairs = zip(drawn.logprobs, drawn.tokens, strict=True)
    told = {
        "finish_reason": {"type": "length", "length": len(drawn.tokens)},
        "prompt_tokens": prompt_tokens,
        "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
        "weight_versions": [{"version": label, "start": 0, "end": len(drawn.tokens)}],
    }
    return {"text": "", "output_ids": drawn.tokens, "meta_info": told}


class SGLang(Engine):
    """Forms its group and opens shared tensors by torch's own code, as SGLang does."""

    child = None

    def __init__(self, directory):
        super().__init__(directory)
        self.post_reset({})

    def post_reset(self, body):
        self.be_called("sglang::scheduler")
        return super().post_reset(body)

    def post_rename(self, body):
        self.be_called("another program")
        return {}

    def be_called(self, name):
        """Have one child of this name, which a follower takes for a worker; it ends with this process."""
        waiting = [name, "-c", "import sys; sys.stdin.read()"]
        self.child, before = None, self.child
        if before is not None:
            before.stdin.close()
            before.wait()
        self.child = subprocess.Popen(waiting, executable=sys.executable, stdin=subprocess.PIPE)

    def get_model_info(self, body):
        return {"model_path": self.directory, "weight_version": self.label}

    def post_generate(self, body):
        told = body["sampling_params"]
        asked = GroupRequest(body["input_ids"], told["n"], told["max_new_tokens"], told["temperature"])
        drawn, label = self.drawn(asked)
        found = [result(one, len(asked.prompt), label) for one in drawn]
        return found if told["n"] > 1 else found[0]

    def get_server_info(self, body):
        sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1}
        return {"version": "0.5.23", "model_path": self.directory, **sizes}

    def answer(self, method, path, body):
        if path == "/ready":
            return (200 if self.running.is_set() else 503), {}
        return super().answer(method, path, body)

    def post_pause_generation(self, body):
        self.running.clear()
        return {}

    def post_continue_generation(self, body):
        self.running.set()
        return {}

    def post_begin_weight_update(self, body):
        if self.is_open:
            raise RefusedError("a weight-update session is already open")
        self.is_open = True
        return {"success": True}

    def post_end_weight_update(self, body):
        if not self.is_open:
            raise RefusedError("no weight-update session is open")
        self.is_open = False
        return {"success": True}

    def post_init_weights_update_group(self, body):
        self.strike("group")
        c10d, limit = dist.distributed_c10d, timedelta(seconds=LONG)
        place = f"tcp://{body['master_address']}:{body['master_port']}"
        store, rank, size = next(
            c10d.rendezvous(place, body["rank_offset"], body["world_size"], timeout=limit)
        )
        store.set_timeout(limit)
        name = body["group_name"]
        store = dist.PrefixStore(name, store)
        backend = {"nccl": AS_NCCL}.get(body["backend"], body["backend"])
        self.groups[name], _ = c10d._new_process_group_helper(
            size, rank, [], backend, store, group_name=name, timeout=limit
        )
        c10d._world.pg_group_ranks[self.groups[name]] = {at: at for at in range(size)}
        return {"success": True}

    def post_update_weights_from_distributed(self, body):
        if not self.is_open:
            raise RefusedError("it must run within a session")
        self.strike("update")
        group, came = self.groups[body["group_name"]], {}
        works = []
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            came[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            works.append(broadcast(group, came[name]))
        for work in works:
            work.wait()
        self.taken(came, body, "group")
        return {"success": True}

    def post_update_weights_from_tensor(self, body):
        if not self.is_open:
            raise RefusedError("it must run within a session")
        self.strike("update")
        (payload,) = body["serialized_named_tensors"]
        self.taken(dict(pickle.loads(base64.b64decode(payload))), body, "memory")
        return {"success": True}

    def taken(self, came, body, way):
        self.fill(came)
        self.ways.add(way)
        self.updates += 1
        self.label = body.get("weight_version", self.label)

    def post_destroy_weights_update_group(self, body):
        group = self.groups.pop(body["group_name"], None)
        if group is None:
            raise RefusedError("the group to be destroyed does not exist")
        dist.destroy_process_group(group)
        return {"success": True}

    def post_update_weights_from_disk(self, body):
        self.read(body["model_path"])
        self.label = body["weight_version"]
        return {"success": True}


class Vllm(Engine):
    """Its worker runs the back end that this package gives vLLM, over a stub of what that needs of vLLM."""

    def __init__(self, directory):
        super().__init__(directory)
        self.worker = vllm_stub.worker(self.fill)

    def get_health(self, body):
        return {}

    def get_version(self, body):
        return {"version": "0.32.0"}

    def get_server_info(self, body):
        return {"vllm_config": {"weight_transfer_config": {"backend": "syncd"}}}

    def get_get_world_size(self, body):
        return {"world_size": 1}

    def get_weight_info(self, body):
        return {"weight_version": self.label}

    def get_is_paused(self, body):
        return {"is_paused": not self.running.is_set()}

    def post_pause(self, body):
        self.running.clear()
        return {}

    def post_resume(self, body):
        self.running.set()
        return {}

    def post_reset_prefix_cache(self, body):
        return {"success": True}

    def post_collective_rpc(self, body):
        self.read(body["kwargs"]["weights_path"])
        return {"results": [None]}

    def post_init_weight_transfer_engine(self, body):
        self.strike("group")
        self.worker.init_transfer_engine(self.worker.parse_init_info(body["init_info"]))
        self.groups = {"group": True}
        return {}

    def post_start_weight_update(self, body):
        if self.is_open:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.is_open = True
        return {}

    def post_update_weights(self, body):
        if not self.is_open:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.strike("update")
            self.worker.update_weights(body["update_info"])
            self.ways.add("memory" if "segment" in body["update_info"] else "group")
        except BaseException:
            self.is_open = False
            raise
        self.updates += 1
        return {}

    def post_finish_weight_update(self, body):
        if not self.is_open:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.worker.finish_weight_update()
        self.is_open = False
        return {}

    def post_shutdown_weight_transfer_engine(self, body):
        if self.is_open:
            raise RuntimeError("Cannot release a trainer connection during a weight update")
        self.worker.shutdown()
        self.groups = {}
        return {}


def over_gloo(store, rank, size, timeout):
    options = OverGloo.Options()
    options._timeout = timeout
    return OverGloo(store, rank, size, options)


class Listener(ThreadingHTTPServer):
    """One thread a request; whoever starts the engine again finds the port free."""

    daemon_threads = True
    allow_reuse_address = True
    engine = None


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._reply("GET")

    def do_POST(self):
        self._reply("POST")

    def _reply(self, method):
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else None
        status, answer = self.server.engine.answer(method, urlsplit(self.path).path, body)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *given):
        """Say nothing."""


def main(kind, directory, port):
    dist.ProcessGroupNCCL = OverGloo
    dist.Backend.register_backend(AS_NCCL, over_gloo, devices=["cuda"])
    torch.set_num_threads(1)
    engine = {"sglang": SGLang, "vllm": Vllm}[kind](directory)
    server = Listener(("127.0.0.1", int(port)), Handler)
    server.engine = engine
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
