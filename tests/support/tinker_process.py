"""A real tinker server on the processor as a process, and what plain torch and peft make of its adapters."""

import gc
import json
import os
import shutil
import time

from support import samples
from support.engine_process import EngineProcess
from support.paths import TESTS

RANK = 8
ENV = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}


def make_qwen3(path):
    """Write a Qwen3 of 90 000 random parameters with a tokenizer: the architecture that the server has."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=samples.VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=64,
        tie_word_embeddings=False, initializer_range=0.1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).float().save_pretrained(path)
    samples.make_tokenizer(path)
    return str(path)


def tinker_server(python, directory, model):
    """Return the server's process; what it compiles is kept beside its environment, for the next start."""
    cache = f"{os.path.dirname(os.path.dirname(os.path.abspath(python)))}/compiled"
    env = ENV | {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    program = [python, f"{TESTS}/programs/tinker_server.py", "{port}", str(directory), str(model), str(RANK)]
    return EngineProcess(program, env, f"{directory}/server.log", ready="/api/v1/healthz")


def collect_connections():
    """Have the collector take the connections that the SDK leaves, while their warnings are still ignored."""
    for _ in range(5):
        gc.collect()
        time.sleep(0.1)


def adapted(model, directory):
    """Return the base model with the adapter of a directory, as peft loads it; it can be trained."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, directory, is_trainable=True)


def next_logprobs(model, tokens):
    """Return the log-prob of each token after the first, with its gradient."""
    import torch

    ids = torch.tensor(list(tokens))
    return model(input_ids=ids[None, :-1]).logits[0].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def factors(model):
    """Return the adapter's tensors by peft's names."""
    from peft import get_peft_model_state_dict

    return {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(model).items()}


def read_config(directory):
    with open(f"{directory}/adapter_config.json") as file:
        return json.load(file)


def copy_without_modules(directory, target):
    """Copy an adapter with the configuration that the server writes: it names no modules."""
    shutil.copytree(directory, target, ignore=shutil.ignore_patterns(".*"))
    with open(f"{target}/adapter_config.json", "w") as file:
        json.dump(read_config(directory) | {"target_modules": None}, file)
