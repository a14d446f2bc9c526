"""The tables of the job's file that trainer and explorers both read. Frozen once they are read.

The description of a key is its only documentation: schemas and the pages of all keys are made of it.
Keys marked `FIXED` are what a run is: a later start in the same job directory must agree with them.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, create_model

from syncd.client.sync_policy import TRANSPORTS, SyncMethod, SyncStyle
from syncd.jobfile.code_trust import FUNCTION, KERNEL
from syncd.protocol.permissions import Permissions
from syncd.registered import registered

JOB_TABLES = "syncd.job_tables"  # the entry points of tables that parts add

Table = TypeVar("Table", bound="Section")

FIXED: dict[str, Any] = {"fixed": True}
"""Goes into the JSON Schema of a key that may not change between two starts."""

CODE: dict[str, Any] = {"code": "any"}
"""The same for a key whose value makes a program run code: see `syncd.jobfile.code_trust`."""

CODE_BY_NAME: dict[str, Any] = {"code": FUNCTION}
"""The same for a key whose value does so if it is `module:function`."""

PATH: dict[str, Any] = {"path": "file"}  # the same for a key that names a file or directory

TASKS: dict[str, Any] = {"path": "tasks"}
"""The same for a key that names a file or directory, or tasks with a scheme such as `datasets:`."""

FIXED_PATH = FIXED | PATH

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Above0 = Annotated[float, Field(gt=0)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
NoneText = Annotated[
    None,
    BeforeValidator(lambda value: None if value == "none" else value),
    WithJsonSchema({"const": "none"}),
]
"""TOML has no word for nothing: `"none"` is one."""


def sync_methods() -> tuple[str, ...]:
    """Return all values of `sync.method`: syncd's own, and the transports that installed packages register."""
    own = tuple(method.value for method in SyncMethod)
    return (*own, *(name for name in registered(TRANSPORTS) if name not in own))


def _sync_method(value: object) -> str:
    """Return the name of a method. Those of syncd are accepted in any case and by their older names."""
    if value in sync_methods():
        return str(value)
    return SyncMethod(str(value)).value


MethodName = Annotated[
    str, BeforeValidator(_sync_method), WithJsonSchema({"type": "string", "enum": list(sync_methods())})
]


class Section(BaseModel):
    """A table of the file: unknown keys are errors, values are not converted behind the user's back."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    def part(self, kind: type[Table]) -> Table:
        """Return the table in this one that a part has registered, by its class; its defaults if none has."""
        return next((table for _, table in self if type(table) is kind), kind())


def with_tables_of_parts(table: str) -> Callable[[type[Table]], type[Table]]:
    """Return a decorator that adds to a table what parts register in it, and so to checks, schema and documentation.

    A part registers `explorer.agent = package.module:AgentSection` under the entry point `syncd.job_tables`, and
    reads it by `file.explorer.part(AgentSection)`. Its module needs no more than pydantic.

    Args:
        table: The table's dotted name, empty for the whole file.
    """
    before = f"{table}." if table else ""

    def add(model: type[Table]) -> type[Table]:
        kinds = {
            name.removeprefix(before): point.load()
            for name, point in registered(JOB_TABLES).items()
            if name.rpartition(".")[0] == table
        }
        fields: dict[str, Any] = {name: (kind, kind()) for name, kind in kinds.items()}
        if not fields:
            return model
        name, module, about = model.__name__, model.__module__, model.__doc__
        return create_model(name, __base__=model, __module__=module, __doc__=about, **fields)

    return add


class JobSection(Section):
    """The run itself."""

    dir: str = Field(json_schema_extra=PATH)
    """The job directory, on a file system that all hosts of the job share."""
    name: str = ""
    """What monitors call the run; the directory's name unless given."""
    state_dir: str = Field(default="", json_schema_extra=PATH)
    """Where `.syncd/` is, if not in the job directory."""
    permissions: Permissions = "umask"
    """Permissions of what is made in the job directory: umask (of each process), private, group."""
    group: str = ""
    """With permissions = "group": name or number of the group."""
    seed: Count = Field(default=0, json_schema_extra=FIXED)
    """Seed of everything random in the trainer."""
    source: str = ""
    """The file that all of this was read from; set when it is read."""


class LoraSection(Section):
    """LoRA: adapters are trained beside layers, and the weights of `model.path` stay as they are."""

    rank: Count = Field(default=0, json_schema_extra=FIXED)
    """Rank of the adapters; 0 trains all weights and no adapter."""
    alpha: Positive = Field(default=16, json_schema_extra=FIXED)
    """What an adapter adds is multiplied by alpha / rank."""
    targets: str | Names = Field(default="all-linear", json_schema_extra=FIXED)
    """Names of the linear layers that get one, or their last parts: ["q_proj", "v_proj"]; else all but the head."""
    exclude: Names = Field(default=(), json_schema_extra=FIXED)
    """Names of layers that get none."""
    adapter: str = Field(default="", json_schema_extra=FIXED_PATH)
    """A directory of peft's with the adapter to start from; its rank and alpha must be given here too."""
    publish: Literal["adapter", "merged"] = Field(default="adapter", json_schema_extra=FIXED)
    """What a step is: the adapter alone, or whole weights with the adapter merged into them in float32."""


class ModelSection(Section):
    """What is trained."""

    path: str = Field(json_schema_extra=FIXED_PATH)
    """A Hugging Face model directory: config.json, weights and tokenizer."""
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", json_schema_extra=FIXED)
    """Of the parameters that the optimizer changes."""
    attn_implementation: str = Field(default="sdpa", json_schema_extra={"code": KERNEL})
    """What transformers takes: sdpa, eager; flash_attention_2 on GPUs, in bfloat16."""
    trust_remote_code: bool = Field(default=False, json_schema_extra=CODE)
    """Whether code that comes with the model may run."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    lora: LoraSection = LoraSection()
    """LoRA: adapters are trained beside layers, and the weights of `model.path` stay as they are."""

    @property
    def publishes_adapters(self) -> bool:
        """Return whether the job's steps are adapters, not whole weights."""
        return self.lora.rank > 0 and self.lora.publish == "adapter"


class ReplaySection(Section):
    """Old groups, drawn again."""

    capacity: Count = Field(default=0, json_schema_extra=FIXED)
    """Groups of the buffer; 0 for no replay."""
    share: Share = Field(default=0.25, json_schema_extra=FIXED)
    """The share of each batch's groups that is drawn from it."""


class DataSection(Section):
    """Where samples come from."""

    groups: Positive = Field(default=8, json_schema_extra=FIXED)
    """Groups of one training step; sft: examples of one step are groups times group_size."""
    group_size: Positive = Field(default=8, json_schema_extra=FIXED)
    """Rollouts of a group."""
    group_timeout: Seconds = 600.0
    """Seconds that a group waits for its missing rollouts before it is dropped."""
    max_waiting: Positive = 4096
    """Experiences that are read and not yet used; further ones wait on disk."""
    max_age: Count | NoneText = Field(default=None, json_schema_extra=FIXED)
    """Age in versions up to which an experience counts in full; none for no bound."""
    beyond: Literal["drop", "weight"] = Field(default="drop", json_schema_extra=FIXED)
    """What happens to older ones."""
    decay: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.5, json_schema_extra=FIXED)
    """With beyond = "weight": the factor for each version too old."""
    strategy: str = Field(default="", json_schema_extra=FIXED)
    """A sample strategy registered under the entry point `trainer.sample_strategies`; else other keys choose."""
    strategy_options: dict[str, Any] = Field(default_factory=dict)
    """What the strategy takes, by its own names; fifo, replay, mix and sft take nothing here."""
    replay: ReplaySection = ReplaySection()
    """Old groups, drawn again."""
    sft_path: str = Field(default="", json_schema_extra=FIXED_PATH)
    """JSONL or Parquet of examples: `tokens` and `prompt_length`, `prompt` and `response`, `messages` and `tools`."""
    sft_ratio: Share = Field(default=0.0, json_schema_extra=FIXED)
    """Share of SFT examples in each batch of experiences; algorithm sft uses only examples."""
    max_length: Positive = Field(default=4096, json_schema_extra=FIXED)
    """Tokens of an SFT example: longer ones are cut at the end, rows whose prompt reaches it are skipped."""
    validation_path: str = Field(default="", json_schema_extra=PATH)
    """JSONL or Parquet of examples, as `sft_path`, whose loss is measured and never trained on."""
    epochs: Count = 0
    """sft: passes over the data set after which the run ends; 0 for no end."""
    consumed: Literal["delete", "archive"] = "delete"
    """What happens to batches once a saved checkpoint covers them."""
    end_when_left: bool = True
    """End the run when all explorers that were there have left and no whole batch waits."""
    left_grace: Seconds = 30.0
    """Seconds after which explorers that are gone have left."""
    wait_timeout: Seconds = 3600.0
    """Seconds without a batch after which the run ends with an error."""


class SyncSection(Section):
    """How weights reach explorers."""

    method: MethodName = SyncMethod.CHECKPOINT.value
    """checkpoint (files), nccl (a broadcast), memory (of its host); auto: the fastest. All fall back to files."""
    style: SyncStyle = Field(default=SyncStyle.FIXED, strict=False)
    """Who decides: fixed, trainer_driven, explorer_driven, fully_async."""
    interval: Positive = Field(default=1, json_schema_extra=FIXED)
    """Steps between two syncs; ages of experiences count in it."""
    offset: Count = 0
    """Steps that explorers are ahead."""
    unwatched: Literal["auto", "publish", "skip"] = "auto"
    """While no explorer lives: publish, or skip all but full checkpoints; auto: skip with sft only."""
    timeout: Seconds = 3600.0
    """Seconds that trainer and explorers wait for each other."""
    mode: Literal["background", "stream"] = "background"
    """background: the loop continues while files are written. stream: it waits, and needs no memory for it."""
    dtype: Literal["bfloat16", "float16", "float32", "keep"] = Field(
        default="bfloat16", json_schema_extra=FIXED
    )
    """Of the weights in a step."""
    check_finite: bool = True
    """Refuse to publish NaN and infinity."""
    probe: bool = True
    """Send with each version what the model answers to a few fixed tokens, to compare engines with: proof.md."""
    delta: Literal["auto", "on", "off"] = "auto"
    """on: store steps as changes while every explorer reads deltas, not with stream or adapters; auto: if quicker."""
    keyframe_every: Annotated[int, Field(ge=1, le=1024)] = 32
    """The most deltas that follow a step that is stored whole; a reader that comes late reads all of them."""
    max_chain_bytes: Count = 0
    """The most bytes of the deltas that follow a step that is stored whole; 0 for half of that step."""
    save_timeout: Seconds = 600.0
    """Seconds that a rank waits for the others' shards."""
    max_failures: Count = 3
    """Syncs in a row that may fail because of storage before the run ends with an error."""
    address: str = ""
    """nccl: the address of rank 0 for explorers; without one, loopback, and none reaches other hosts."""
    bucket_mib: Positive = 256
    """nccl: MiB that are sent at once; rank 0 keeps twice as much."""
    ready_timeout: Seconds = 60.0
    """nccl: seconds that the trainer waits for explorers to be ready; then a step goes through files alone."""
    broadcast_timeout: Seconds = 60.0
    """nccl: seconds that a broadcast may take from then on."""
    # What is made below is private to its user.
    memory_dir: str = Field(default="/dev/shm", json_schema_extra=PATH)  # noqa: S108
    """memory: a directory of the trainer's host that is kept in memory (tmpfs)."""
    memory_mib: Count = 0
    """memory: MiB that copies may take together; 0 for half of what that file system can take."""
