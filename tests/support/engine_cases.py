"""Cases that ranks run for tests of engines, and what each of them found. Imported by programs/run_cases.py only."""

import contextlib
import os
import pickle
import shutil
import tempfile
from dataclasses import dataclass

import torch

from support import samples
from syncd.errors import SyncdError
from syncd.protocol.layout import Job
from syncd.protocol.manifest import damaged_files, read_manifest
from syncd.protocol.memory_copies import MemoryDirectory, is_copy_of
from syncd.transports.host_memory import HostMemory
from syncd.transports.ranks import Ranks
from trainer.checkpoints import TrainerState
from trainer.engines.base import make_engine
from trainer.engines.state_copy import StateBuffer
from trainer.engines.verl.rows import rollout_rows
from trainer.resume import find_state

SHM = "/dev/shm"


@dataclass
class Bench:
    """Where a program runs: its directory, the engine's name, the directory of models, its device, and the ranks."""

    directory: str
    engine: str
    models: str
    device: str
    ranks: Ranks

    def engine_of(self, which="untied", /, **tables):
        """Return a prepared engine for a model, with tables of the configuration."""
        kind = self.device.split(":")[0]
        tables["engine"] = {"name": self.engine, "device": kind} | tables.get("engine", {})
        config = samples.configured(f"{self.models}/{which}", self.directory, **tables)
        engine = make_engine(samples.context_of(config, self.ranks, self.device))
        engine.prepare()
        return engine

    @property
    def mixes(self):
        """Say whether the engine learns rollouts and examples in one step."""
        return self.engine != "verl_legacy"

    def place(self, name):
        """Return a directory that all ranks share, made by the first."""
        path = f"{self.directory}/{name}"
        os.makedirs(path, exist_ok=True)
        return path


def weights_of(engine):
    return {name: tensor.detach().clone() for name, tensor in engine.export()}


def trained(engine, seeds, *, mixed):
    return [
        engine.train_step(samples.batch_of(seed, weight=0.5, examples=seed % 2 if mixed else 0))
        for seed in seeds
    ]


def write_state(engine, directory):
    """Write this rank's part of a training state, from a copy of it."""
    arena = StateBuffer(HostMemory(1 << 30))
    captured = arena.capture(engine.training_state())
    assert not captured.live
    captured.write(directory)
    arena.close()


def contract(bench, **tables):
    """Train, save, train on; and once more from what was saved."""
    mixed = bench.mixes
    tables = ({"data": {"sft_ratio": 0.1}} if mixed else {}) | tables
    engine = bench.engine_of(**tables)
    found = {"fresh": engine.train_step_num, "start": weights_of(engine)}
    found["metrics"] = trained(engine, (1, 2), mixed=mixed)
    write_state(engine, bench.place("state"))
    found["saved"] = weights_of(engine)
    found["metrics"] += trained(engine, (3, 4), mixed=mixed)
    found |= {"steps": engine.train_step_num, "end": weights_of(engine)}
    found["times"] = engine.step_times
    write_state(engine, bench.place("straight"))
    again = bench.engine_of(**tables)
    again.load_training_state(bench.place("state"))
    found["again"] = trained(again, (3, 4), mixed=mixed)
    write_state(again, bench.place("resumed"))
    found["end again"] = weights_of(again)
    bench.ranks.gather(None)  # all files are there
    found["files"] = {
        name: equal(*(content_of(f"{bench.place(place)}/{name}") for place in ("straight", "resumed")))
        for name in os.listdir(bench.place("straight"))
    }
    found |= {"tied": sorted(engine.tied), "companions": dict(engine.companions())}
    found["log_probs"] = log_probs(engine, samples.batch_of(9))
    found["token_logprobs"] = engine.token_logprobs([row.tokens for row in samples.batch_of(9).experiences])
    found["limits"] = engine.limits
    engine.shutdown()
    return found


def content_of(path):
    if path.endswith(".pt"):
        return torch.load(path, weights_only=False)
    with open(path, "rb") as file:
        return file.read()


def equal(one, other):
    """Say whether two things made of tensors, arrays and plain values are the same, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        local, its = (getattr(tensor, "_local_tensor", tensor) for tensor in (one, other))
        return local.dtype == its.dtype and torch.equal(local, its)
    return bool((one == other).all()) if hasattr(one, "all") else one == other


def other_ranks(bench):
    """Load a training state of two ranks, and one that is cut off; this is one rank."""
    engine = bench.engine_of()
    engine.load_training_state(f"{bench.directory}/state")
    found = {"weights": weights_of(engine), "metrics": trained(engine, (3,), mixed=bench.mixes)}
    return found | {"cut": refusal(lambda: engine.load_training_state(f"{bench.directory}/cut"))}


def cut_off(bench):
    """Load a state of which the last rank's part is cut off."""
    engine = bench.engine_of()
    place = bench.place("cut")
    write_state(engine, place)
    last = bench.ranks.world_size - 1
    if bench.ranks.rank == last:
        name = next(
            name for name in os.listdir(place) if f"{last}" in name.removeprefix("model_world_size_2")
        )
        os.truncate(f"{place}/{name}", 2000)
    bench.ranks.gather(None)
    return refusal(lambda: engine.load_training_state(place))


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, mark):
        self._mark = mark

    def __reduce__(self):
        return (open, (self._mark, "w"))


def _plant(path, how, mark):
    """Put an object into a file: alone, by pickle or as torch writes now or wrote before, or beside what is there."""
    content = {"planted": Planted(mark)}
    if how == "beside":
        content |= content_of(path)
    with open(path, "wb") as file:
        if how == "pickle":
            pickle.dump(content, file)
        else:
            torch.save(content, file, _use_new_zipfile_serialization=how != "former")


def planted(bench, engine=None):
    """Resume from a full checkpoint with an object in each of its files in turn; return what came of each."""
    place = bench.place("planted")
    job = Job.at(place)
    engine = engine or bench.engine_of(job={"dir": place})
    engine.train_step(samples.batch_of(1))
    engine.save_checkpoint(TrainerState(1, 1, bench.ranks.world_size).document(), block_until_saved=True)
    bench.ranks.gather(None)
    step, found = job.step(1), {}
    names = [os.path.relpath(f"{path}/{name}", step) for path, _, there in os.walk(step) for name in there]
    for number, name in enumerate(sorted(names)):
        for how in ("pickle", "saved", "former", *(["beside"] if name.endswith(".pt") else [])):
            if bench.ranks.rank == 0:
                shutil.copyfile(f"{step}/{name}", f"{bench.directory}/aside")
                _plant(f"{step}/{name}", how, f"{place}/ran-{number}-{how}")
            bench.ranks.gather(None)
            found[name, how] = refusal(lambda: (find_state(job), engine.load_checkpoint(1)))
            bench.ranks.gather(None)
            if bench.ranks.rank == 0:
                shutil.copyfile(f"{bench.directory}/aside", f"{step}/{name}")
            bench.ranks.gather(None)
    whole = refusal(lambda: engine.load_checkpoint(1))
    ran = sorted(name for name in os.listdir(place) if name.startswith("ran-"))
    return {"outcomes": found, "ran": ran, "whole": whole}


def remembered(bench):
    """Hand a step out through memory; return what was there while the engine ran, and what is left of it."""
    root = bench.ranks.broadcast(
        tempfile.mkdtemp(prefix="syncd-test-", dir=SHM) if bench.ranks.rank == 0 else ""
    )
    job = Job.at(bench.place("remembered"))
    engine = bench.engine_of(job={"dir": job.root}, sync={"method": "memory", "memory_dir": root})
    engine.train_step(samples.batch_of(1))
    engine.upload_state_dict()
    engine.wait_for_save()
    manifest = read_manifest(job.disk, job.step(1))
    path = MemoryDirectory.here(root, job.root).copy(1, manifest.attempt)
    found = {"holds": is_copy_of(path, manifest), "damaged": damaged_files(job.disk, path, manifest)}
    found |= {"shards": len(manifest.shards), "methods": sorted(engine.senders), "sent": engine.sent}
    bench.ranks.gather(None)  # all have looked
    engine.shutdown()
    bench.ranks.gather(None)
    if bench.ranks.rank == 0:
        found["left"] = os.listdir(root)
        shutil.rmtree(root)
    return found


def log_probs(engine, batch):
    """Return the log-probs of each experience's response tokens at the job's temperature, on all ranks."""
    if hasattr(engine, "log_probs"):
        return engine.log_probs(batch)
    rollouts, found = rollout_rows(batch), {}
    own, _ = engine._forward(engine.model, rollouts, engine._deal(rollouts, range(len(rollouts))))
    for part in engine.context.ranks.gather(own):
        found |= part
    return [found[number] for number in range(len(rollouts))]


def refusal(call):
    """Return what a call was refused with: kind, message, hint."""
    try:
        call()
    except SyncdError as error:
        return type(error).__name__, str(error), error.hint or ""
    return None


@contextlib.contextmanager
def gradients(engine):
    """Keep the whole gradients that the optimizer is given, by name."""
    kept = {}
    model = engine.model

    def keep(*_):
        for name, parameter in model.module.named_parameters():
            if parameter.requires_grad:  # with LoRA, most are not
                kept[name] = parameter.grad.full_tensor().clone()

    handle = model.optimizer.register_step_pre_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()


def published(bench):
    """Write a step in the dtype of the model and one in bf16; return the log-probs that they must give."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        bench.place(dtype)
        tables = {"job": {"dir": f"{bench.directory}/{dtype}"}, "sync": {"dtype": dtype}}
        engine = bench.engine_of("untied", **tables)
        engine.train_step(samples.batch_of(1))
        engine.save_checkpoint({}, block_until_saved=True, save_as_hf=True)
        found[dtype] = (
            f"{bench.directory}/{dtype}/global_step_1/actor",
            log_probs(engine, samples.batch_of(9)),
        )
        engine.shutdown()
    return found
