"""The layout of each framework: Trinity-RFT and verl, tinker, prime-rl, plain Hugging Face exports.

Read for each, and trees built after it; no run of these systems was followed:

- tinker, trinity-0.6, verl-lora: agentscope-ai/Trinity-RFT 877840c `tinker_trainer.py`, 139d1c4 `workers.py` and
  `trainer.py`; pan-x-c/Trinity-RFT 0f0f947 `stream_saver.py`. The stream goes to `.tmp`, its header last, then a
  rename; the markers are written in place, after the files.
- verl-fsdp: verl-project/verl 1dda039 and b178a3c `fsdp_checkpoint_manager.py`, `checkpoint_handler.py`;
  Trinity-RFT d3fad0c. Exports may come in a thread after the marker.
- verl-megatron: the same commits of verl, `megatron_checkpoint_manager.py`; NVIDIA/Megatron-LM 0057095
  `dist_checkpointing/serialization.py`; torch 2.13.0 `checkpoint/filesystem.py`, and a checkpoint written by it.
- prime-rl: PrimeIntellect-ai/prime-rl 559b447 `weights.py`, `pathing.py`, `transports/weights`, `ckpt.py`. `STABLE`
  comes last; a broadcast over NCCL leaves it and no weights.
- huggingface: the names that these libraries import from transformers and huggingface_hub.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from syncd.daemon.foreign.directory import StepDirectory, Verdict, joined
from syncd.daemon.foreign.find_weights import (
    CONFIG,
    METADATA,
    SAFETENSORS,
    find_adapter,
    find_distributed,
    find_shards,
    needing,
)
from syncd.daemon.foreign.weights import StepWeights, gather, lacking, together
from syncd.daemon.foreign.whole_files import whole_archive
from syncd.protocol.disk import Disk
from syncd.protocol.layout import ACTOR, FULL_CHECKPOINT, MAX_STEP, parse_step_name
from syncd.protocol.step import Step, StepState


@dataclass(frozen=True, slots=True)
class ForeignLayout:
    name: str  # the step's layout in the version file, so that a reader knows how to load it
    # Returns the step of a directory name, None for any name that is not exactly one.
    step_of: Callable[[str], int | None]
    # Returns the weights of a step directory, None for one that is not of this layout.
    find: Callable[[StepDirectory], StepWeights | None]
    is_full: Callable[[StepDirectory], bool]  # returns whether training can resume from the step
    # What tells that a step's writer is done: a file in the step (itself), the job's marker or tracker file
    # (marker), or that the step has not changed for a while (time).
    announced_by: Literal["itself", "marker", "time"]

    def examine(self, directory: StepDirectory, name: str, step: int) -> Step | None:
        weights = self.find(directory)
        if weights is None:
            return None
        payload = f"{name}/{weights.subdirectory}" if weights.subdirectory else name
        return Step(
            step=step,
            directory=name,
            layout=self.name,
            state=weights.state,
            payload=weights.uri or payload,
            kind=weights.kind,
            digest="" if weights.state is StepState.FILLING else weights.fingerprint,
            present=weights.present,
            expected=weights.expected,
            size=weights.size,
            full=self.is_full(directory),
            problem=weights.problem,
            announced_by=self.announced_by,
        )


def numbered_after(prefix: str) -> Callable[[str], int | None]:
    """Return a strict parser of names that are a prefix and a step, without leading zeros and in ASCII."""
    pattern = re.compile(rf"{re.escape(prefix)}(0|[1-9][0-9]{{0,15}})", re.ASCII)

    def step_of(name: str) -> int | None:
        match = pattern.fullmatch(name)
        step = int(match[1]) if match else None
        return step if step is not None and step <= MAX_STEP else None

    return step_of


def _has_file(subdirectory: str, *names: str) -> Callable[[StepDirectory], bool]:
    return lambda directory: any(directory.has_file(subdirectory, name) for name in names)


_has_mark = _has_file("", FULL_CHECKPOINT)


# --- verl, and Trinity-RFT, which trains with it: `global_step_<N>/`, announced by the job's marker ---------------

_ADAPTER = f"{ACTOR}/lora_adapter"
_EXPORT = "huggingface"
_STREAM = "model.safetensors.tmp"
_NUMBER = r"(0|[1-9][0-9]{0,5})"
_RANKED = re.compile(rf"(model|optim|extra_state)_world_size_{_NUMBER}_rank_{_NUMBER}\.pt", re.ASCII)


def _verl_base(directory: StepDirectory) -> str:
    """Return where an engine's checkpoint is: verl's supervised trainer writes into the step itself."""
    return ACTOR if directory.has_directory(ACTOR) else ""


def _with_adapter(directory: StepDirectory, weights: StepWeights | None) -> StepWeights | None:
    """Return weights that are whole only with the adapter beside them, if its directory is there."""
    if weights is None or not directory.has_directory(_ADAPTER):
        return weights
    return together(weights, find_adapter(directory, _ADAPTER) or StepWeights(_ADAPTER, expected=1))


def _trinity(directory: StepDirectory) -> StepWeights | None:
    weights = find_shards(directory, ACTOR, (SAFETENSORS,))
    # The stream is renamed when it ends. One that a crash left behind must not hide what was saved later.
    if (
        weights is None
        and _STREAM in directory.names(ACTOR)
        and not (_fsdp(directory) or _megatron(directory))
    ):
        weights = StepWeights(ACTOR, expected=1)
    return _with_adapter(directory, weights)


def _ranks(directory: StepDirectory, subdirectory: str, part: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, world size and rank of each file of one part of a checkpoint."""
    for name in directory.names(subdirectory):
        match = _RANKED.fullmatch(name)
        if match and match[1] == part:
            yield name, int(match[2]), int(match[3])


def _fsdp(directory: StepDirectory) -> StepWeights | None:
    subdirectory = _verl_base(directory)
    shards = list(_ranks(directory, subdirectory, "model"))
    if not shards:
        others = {
            size for part in ("optim", "extra_state") for _, size, _ in _ranks(directory, subdirectory, part)
        }
        # A checkpoint may leave the ranks' shards out in favour of an export.
        if not others or find_shards(directory, joined(subdirectory, _EXPORT)):
            return None
        return StepWeights(subdirectory, expected=min(others) if len(others) == 1 else None)
    files = gather(directory, subdirectory, (name for name, _, _ in shards), whole_archive)
    sizes = sorted({size for _, size, _ in shards})
    if len(sizes) > 1:
        return StepWeights(
            subdirectory, files, broken=f"shards of world sizes {sizes[0]} and {sizes[-1]} are mixed"
        )
    if beyond := [name for name, size, rank in shards if rank >= size]:
        return StepWeights(subdirectory, files, broken=f"{beyond[0]} has a rank beyond its world size")
    return _with_adapter(directory, StepWeights(subdirectory, files, sizes[0]))


def _megatron(directory: StepDirectory) -> StepWeights | None:
    base = _verl_base(directory)
    nested = joined(base, "model")
    root = nested if directory.has_directory(nested) else base
    data, export = joined(root, "dist_ckpt"), joined(root, _EXPORT)
    if not directory.has_directory(data) and not (root == nested and directory.has_directory(export)):
        return None
    # With a bridge the weights are the export, and what was distributed is the optimizer's state.
    return (
        find_shards(directory, export)
        or find_distributed(directory, data)
        or find_adapter(directory, f"{export}/adapter")
        or StepWeights(data)
    )


def _verl_export(directory: StepDirectory) -> StepWeights | None:
    subdirectory = joined(_verl_base(directory), _EXPORT)
    weights = find_shards(directory, subdirectory)
    if weights is None and directory.has_directory(subdirectory) and not directory.has_directory(_ADAPTER):
        weights = StepWeights(subdirectory)
    return _with_adapter(directory, weights)


def _verl_adapter(directory: StepDirectory) -> StepWeights | None:
    if not directory.has_directory(_ADAPTER):
        return None
    return find_adapter(directory, _ADAPTER) or StepWeights(_ADAPTER, expected=1, kind="lora")


def _has_optimizer(directory: StepDirectory) -> bool:
    states = [size for _, size, _ in _ranks(directory, _verl_base(directory), "optim")]
    return _has_mark(directory) or (bool(states) and len(states) == min(states))


def _has_distributed_optimizer(directory: StepDirectory) -> bool:
    subdirectory = joined(_verl_base(directory), "optimizer/dist_ckpt")
    return _has_mark(directory) or directory.has_file(subdirectory, METADATA)


# --- tinker, as Trinity-RFT uses it: the weights stay with the service, and the step holds their path -------------
# `remote_sampler_path.txt` is written in place, and the marker after it; the daemon waits for a path that is late.

_SAMPLER = "remote_sampler_path.txt"
_CHECKPOINT = "remote_checkpoint_path.txt"
_PATH_LIMIT = 4096
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[!-~]+", re.ASCII)


def whole_path(disk: Disk, path: str, _size: int, _progress: Callable[[], None] = lambda: None) -> Verdict:
    """Return whether a file holds the path of remote weights, with that path."""
    text = disk.read(path, _PATH_LIMIT).decode("ascii", "replace").strip()
    if not _URI.fullmatch(text):
        return Verdict(StepState.FILLING, "it holds no path yet" if not text else "it holds no URI")
    return Verdict(names={text: 0})


def _tinker(directory: StepDirectory) -> StepWeights | None:
    if directory.names().keys().isdisjoint((_SAMPLER, _CHECKPOINT)):
        return None
    files = gather(directory, "", (_SAMPLER,), whole_path)
    uri = next((name for file in files for name in file.verdict.names), "")
    return StepWeights("", files, 1, kind="remote", uri=uri)


def _has_remote_checkpoint(directory: StepDirectory) -> bool:
    return _has_mark(directory) and directory.has_file("", _CHECKPOINT)


# --- prime-rl: `step_<N>/` with weights under Hugging Face names, and `STABLE` once all are there -----------------

_STABLE = "STABLE"
_PRIME_PLACES = ("", "weight", "weights")
# Each rank writes under such a name and renames its files once it knows how many there are.
_UNNAMED = re.compile(r"tmp-rank[0-9]+.*\.safetensors", re.ASCII)


def _prime(directory: StepDirectory) -> StepWeights | None:
    weights = _prime_weights(directory)
    if weights is None:
        # Where weights are broadcast the step is empty but for the ready file.
        ready = _STABLE in directory.names()
        return StepWeights("", missing="it is ready and holds no weights") if ready else None
    return weights if directory.has_file("", _STABLE) else lacking(weights, f"{_STABLE} does not exist yet")


def _prime_weights(directory: StepDirectory) -> StepWeights | None:
    for subdirectory in _PRIME_PLACES:
        weights = find_shards(directory, subdirectory) or find_adapter(directory, subdirectory)
        if weights is not None:
            return weights
        if any(map(_UNNAMED.fullmatch, directory.names(subdirectory))):
            return StepWeights(subdirectory)
    return None


# --- plain Hugging Face exports: `checkpoint-<N>/`. Nothing announces them; they count once they stop changing ----


def _huggingface(directory: StepDirectory) -> StepWeights | None:
    model = find_shards(directory, "")
    if model is not None:
        return needing(directory, model, CONFIG)
    return find_adapter(directory, "") or (StepWeights("") if CONFIG in directory.names() else None)


LAYOUTS = (
    ForeignLayout("tinker", parse_step_name, _tinker, _has_remote_checkpoint, "marker"),
    ForeignLayout("trinity-0.6", parse_step_name, _trinity, _has_mark, "marker"),
    ForeignLayout("verl-fsdp", parse_step_name, _fsdp, _has_optimizer, "marker"),
    ForeignLayout("verl-megatron", parse_step_name, _megatron, _has_distributed_optimizer, "marker"),
    ForeignLayout("verl-huggingface", parse_step_name, _verl_export, _has_mark, "marker"),
    ForeignLayout("verl-lora", parse_step_name, _verl_adapter, _has_mark, "marker"),
    ForeignLayout("prime-rl", numbered_after("step_"), _prime, _has_file("trainer", METADATA), "itself"),
    ForeignLayout(
        "huggingface",
        numbered_after("checkpoint-"),
        _huggingface,
        _has_file("", "optimizer.pt", "optimizer.bin"),
        "time",
    ),
)
"""Every layout; the first that matches a directory decides."""
