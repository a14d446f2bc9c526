"""Cases of LoRA on verl's engine: steps that plain torch and peft repeat by hand, publishing, resuming, refusals."""

import json
import os
import shutil

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from support import samples
from support.engine_cases import content_of, contract, gradients, refusal, trained, weights_of, write_state
from support.verl_cases import PROBED, _chosen, _distribution, _grpo, _sft
from syncd.protocol.layout import Job
from syncd.protocol.manifest import read_manifest
from syncd.protocol.probe import read_base_probe

RANK, ALPHA, KL = 4, 12, 0.1
TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(bench, **more):
    """Return the table of the model with the adapter that `make_adapter` has made."""
    return {"lora": {"rank": RANK, "alpha": ALPHA, "adapter": f"{bench.models}/adapter", **more}}


def make_adapter(path, model, **more):
    """Write an adapter of peft's whose A and B are random, so that it changes the model's answers."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM", **more)
    found = peft.get_peft_model(base, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    found.save_pretrained(str(path))


def rename_tensors(adapter):
    """Name an adapter's tensors as those of a model that has this one as its language model."""
    path = f"{adapter}/adapter_model.safetensors"
    tensors = load_file(path)
    save_file(
        {name.replace("model.layers", "model.language_model.layers"): tensors[name] for name in tensors}, path
    )


def plain_model(bench, adapter=None, model="untied"):
    """Return peft's model with an adapter, trainable; without one, the model itself."""
    base = transformers.AutoModelForCausalLM.from_pretrained(f"{bench.models}/{model}", dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True) if adapter else base


STEPS = {
    "grpo": {},
    "kl": {"kl_coef": KL, "kl_type": "low_var_kl"},
    "sft": {"name": "sft"},
}


def lora_steps(bench):
    """Return what two steps of each algorithm did: gradients, figures and the adapter after each."""
    found = {}
    for name, algorithm in STEPS.items():
        engine = bench.engine_of(model=lora(bench), algorithm=algorithm)
        found[name] = []
        for seed in (1, 2):
            with gradients(engine) as kept:
                metrics = engine.train_step(samples.batch_of(seed, examples=5 if name == "sft" else 0))
            found[name].append((dict(kept), metrics, weights_of(engine)))
    return found


def expected_lora_steps(bench):
    """Return the same by torch and peft alone, on one process, with the formulas written out."""
    found = {}
    for name in STEPS:
        model, start = plain_model(bench, f"{bench.models}/adapter"), plain_model(bench)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0)
        found[name] = []
        for seed in (1, 2):
            batch = samples.batch_of(seed, examples=5 if name == "sft" else 0)
            loss = _sft(model, batch.examples) if name == "sft" else _grpo(model, batch)
            kl = _kl(model, start, batch) if name == "kl" else torch.zeros(())
            optimizer.zero_grad()
            (loss + KL * kl).backward()
            kept = {key: value.grad.clone() for key, value in model.named_parameters() if value.requires_grad}
            optimizer.step()
            weights = {key: value.clone() for key, value in peft.get_peft_model_state_dict(model).items()}
            found[name].append((kept, float(loss.detach()), float(kl.detach()), weights))
    return found


def _kl(model, start, batch):
    """Return the mean of verl's `low_var_kl` over the learnt tokens."""
    total, tokens = 0, 0
    for row in batch.experiences:
        mine = _chosen(_distribution(model, row.tokens, row.prompt_length), row.tokens, row.prompt_length)
        with torch.no_grad():
            its = _chosen(_distribution(start, row.tokens, row.prompt_length), row.tokens, row.prompt_length)
        apart, mask = (its - mine).clamp(-20, 20), torch.tensor(list(row.action_mask))
        total = total + ((apart.exp() - apart - 1).clamp(-10, 10) * mask).sum()
        tokens += int(mask.sum())
    return total / tokens


def lora_resumed(bench):
    """Train, save, train on; and once more from what was saved: new adapters of all linear layers."""
    found = contract(bench, model={"lora": {"rank": RANK}})
    own = f"model_world_size_{bench.ranks.world_size}_rank_{bench.ranks.rank}.pt"
    return found | {"names": set(content_of(f"{bench.place('state')}/{own}"))}


def lora_resharded(bench):
    """Go on from what other ranks have saved in the middle of `lora_resumed`."""
    engine = bench.engine_of(model={"lora": {"rank": RANK}}, data={"sft_ratio": 0.1})
    engine.load_training_state(bench.place("state"))
    found = {"loaded": weights_of(engine), "metrics": trained(engine, (3, 4), mixed=True)}
    return found | {"end": weights_of(engine)}


def lora_published(bench):
    """Publish a full checkpoint as an adapter and one as merged weights; return where, and what they must answer."""
    found = {}
    for publish in ("adapter", "merged"):
        root = bench.place(f"job-{publish}")
        tables = {"job": {"dir": root}, "sync": {"dtype": "float32"}}
        engine = bench.engine_of("tied-safe" if publish == "merged" else "untied", **tables, model=(
            {"lora": {"rank": RANK, "publish": "merged"}} if publish == "merged" else lora(bench)
        ))  # fmt: skip
        engine.record_start()
        fresh = engine.token_logprobs(PROBED)
        for seed in (1, 2):
            engine.train_step(samples.batch_of(seed))
        engine.save_checkpoint({}, block_until_saved=True, save_as_hf=True)
        job = Job.at(root)
        found[publish] = {
            "step": job.step(2), "manifest": read_manifest(job.disk, job.step(2)), "fresh": fresh,
            "answers": engine.token_logprobs(PROBED), "base": read_base_probe(job), "exported": weights_of(engine),
            "training": sorted(os.listdir(f"{job.step(2)}/training")), "record": engine.base,
        }  # fmt: skip
        if publish == "merged":
            found["trap"] = {name: tensor.clone() for name, tensor in engine.model.get_per_tensor_param()[0]}
        engine.shutdown()
    return found


def plain_answers(bench):
    """Return what transformers answers with the models that LoRA starts from."""
    return {model: answers_of(f"{bench.models}/{model}") for model in ("untied", "tied-safe")}


def answers_of(model, adapter=None, rows=PROBED):
    """Return the log-probs of rows of tokens by transformers and peft: of a model's directory, with an adapter's."""
    found = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = (peft.PeftModel.from_pretrained(found, adapter) if adapter else found).eval()
    with torch.no_grad():
        return [_chosen(_distribution(found, row, 1), row, 1).tolist() for row in rows]


REFUSED = {
    "fsdp": {"engine": {"strategy": "fsdp"}, "model": {"lora": {"rank": 4}}},
    "no rank": {"model": {"lora": {"alpha": 8}}},
    "nccl": {"sync": {"method": "nccl"}, "model": {"lora": {"rank": 4}}},
    "embedding": {"model": {"lora": {"rank": 4, "targets": ["embed_tokens"]}}},
    "nothing": {"model": {"lora": {"rank": 4, "targets": ["w_pack"]}}},
    "another rank": {"model": {"lora": {"rank": 8, "alpha": ALPHA, "adapter": "{models}/adapter"}}},
    "another alpha": {"model": {"lora": {"rank": 4, "alpha": 8, "adapter": "{models}/adapter"}}},
    "targets of an adapter": {
        "model": {"lora": {"rank": 4, "alpha": ALPHA, "adapter": "{models}/adapter", "targets": ["q_proj"]}}
    },
    "no adapter": {"model": {"lora": {"rank": 4, "alpha": ALPHA, "adapter": "{models}/untied"}}},
    "adapter of another model": {
        "model": {"lora": {"rank": 4, "alpha": ALPHA, "adapter": "{models}/renamed-adapter"}}
    },
    "dora": {"model": {"lora": {"rank": 4, "alpha": ALPHA, "adapter": "{models}/dora"}}},
}


def lora_refused(bench):
    """Return what each configuration is refused with, and a state whose base has changed since."""
    found = {}
    for name, tables in REFUSED.items():
        text = json.dumps(tables).replace("{models}", bench.models)
        found[name] = refusal(lambda text=text: bench.engine_of(**json.loads(text)))
    found["binary"] = refusal(lambda: bench.engine_of("tied", model={"lora": {"rank": 4}}))
    head = {"lora": {"rank": 4, "targets": ["q_proj", "lm_head"]}}
    found["tied head"] = refusal(lambda: bench.engine_of("tied-safe", model=head))
    model = shutil.copytree(f"{bench.models}/untied", f"{bench.directory}/moved")
    engine = bench.engine_of(f"{os.path.relpath(model, bench.models)}", model={"lora": {"rank": 4}})
    write_state(engine, bench.place("moved-state"))
    tensors = load_file(f"{model}/model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, f"{model}/model.safetensors", {"format": "pt"})
    other = bench.engine_of(f"{os.path.relpath(model, bench.models)}", model={"lora": {"rank": 4}})
    found["another base"] = refusal(lambda: other.load_training_state(bench.place("moved-state")))
    return found
