"""The table [explorer] of the job's file and the tables in it.

A key's description is its only documentation: the schema and docs/configuration.md are made of it.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from syncd.errors import ConfigError
from syncd.jobfile.evaluation import EvaluationSection
from syncd.jobfile.problems import nearest
from syncd.jobfile.sections import (
    CODE,
    CODE_BY_NAME,
    PATH,
    TASKS,
    Count,
    NoneText,
    Positive,
    Seconds,
    Section,
    with_tables_of_parts,
)
from syncd.jobfile.task_sets import SET, TaskSetSection
from syncd.registered import registered

ENGINES = "explorer.engines"
"""The entry points of further inference engines, by `explorer.engine.kind`: functions of a file."""

SERVERS = ("vllm", "sglang")  # the kinds that are servers with a completions API


def engine_kinds() -> tuple[str, ...]:
    """Return all values of `explorer.engine.kind`: syncd's own, and the engines that installed packages register."""
    return ("transformers", *SERVERS, *registered(ENGINES))


def _engine_kind(value: object) -> str:
    if value not in engine_kinds():
        raise ValueError(value)
    return str(value)


EngineKind = Annotated[
    str,
    BeforeValidator(_engine_kind),
    WithJsonSchema({"type": "string", "enum": list(engine_kinds())}),
]


class InferenceSection(Section):
    """What generates."""

    kind: EngineKind = "transformers"
    """transformers: a model in this process. vllm, sglang: a server, by its completions API. tinker: by its SDK."""
    address: str = ""
    """vllm, sglang, tinker: the server's URL, http://127.0.0.1:8000; with a command a free port unless given."""
    model: str = ""
    """vllm, sglang, tinker: what requests call the (base) model; what the server names unless given."""
    reload: Literal["in_place", "restart"] = "in_place"
    """vllm, sglang: in_place: it reads each version; restart: the explorer owns the server, and starts it on each."""
    command: str = Field(default="", json_schema_extra=CODE)
    """vllm, sglang: starts the server on `{model}` at `{host}` and `{port}`; split into words as a shell does."""
    options: dict[str, str] = Field(default_factory=dict)
    """vllm, sglang: what the engine's hook takes, as `--hook-option` of `syncd follow`."""
    token_env: str = ""
    """The environment variable that holds the server's API key; tinker: TINKER_API_KEY unless given."""
    concurrency: Positive = 32
    """vllm, sglang, tinker: groups requested at the same time."""
    timeout: Seconds = 600.0
    """vllm, sglang, tinker: seconds that one request may take; also those of one load."""
    retries: Count = 4
    """vllm, sglang: retries of a request that failed temporarily, each after a longer pause."""
    spans: Literal["auto", "required", "off"] = "auto"
    """vllm, sglang: the version of each token by the server; auto: if it names it; required: an error if not."""
    processed_logprobs: bool = False
    """vllm, sglang: log-probs are of the sampling temperature (vLLM: --logprobs-mode processed_logprobs)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """transformers: the device of the model; auto is cuda if a GPU is visible."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """transformers: of the parameters; log-probs are taken from logits in float32 in any case."""
    rows: Positive = 128
    """transformers: rollouts of one generate call at most; whole groups, at least one."""


class FollowSection(Section):
    """How versions are loaded."""

    stage: str = Field(default="", json_schema_extra=PATH)
    """A directory of this host for one copy of each version, shared by all explorers on it: /dev/shm/syncd."""
    peers: str = ""
    """HOST:PORT at which this host gives its pieces of a version to others; then it reads the rest from them."""
    early: bool = False
    """With `stage`: copy a version while the trainer still writes it."""
    verify: Literal["size", "header", "content"] = "content"
    """The check of a version before the engine is touched; content: every byte against its digest."""
    retries: Count = 2
    """Further attempts of a load that failed."""
    max_lag: Count | NoneText = None
    """Steps that the engine may be behind what is published; work waits while it is further behind."""
    reload_test: bool = True
    """Have an engine on the job's start model first reload that, to show that it can."""
    exam: Literal["auto", "on", "off"] = "auto"
    """Whether an engine first shows that its way of loading reaches every tensor; auto: if nobody else uses it."""
    prove_every: Annotated[float, Field(ge=0)] = 600.0
    """Seconds after which an engine that has proven what it runs is asked again; 0 for never."""


class SamplingSection(Section):
    """What is generated. Rollouts are sampled from the whole distribution at `algorithm.temperature`."""

    max_tokens: Positive = 1024
    """Tokens of a response at most."""
    max_prompt_tokens: Positive = 4096
    """Tokens of a prompt at most; tasks with longer ones are skipped and counted."""


class RewardSection(Section):
    """What a response is worth."""

    function: str = Field(default="auto", json_schema_extra=CODE_BY_NAME)
    """auto (reasoning_gym's own for its tasks, else exact_match), exact_match, math, math_verify, module:function."""
    functions: dict[str, float] = Field(default_factory=dict, json_schema_extra=CODE_BY_NAME)
    """Several functions with their weights, instead of `function`: { math = 1.0, "rewards:short" = 0.2 }."""
    timeout: Seconds = 30.0
    """Seconds that one call may take."""
    workers: Positive = 1
    """Processes of each function; exact_match and math need none."""
    retries: Count = 0
    """Further calls of a function that raised, hung, ended its process or returned no number."""
    pause: Seconds = 1.0
    """Seconds before the first of them; before each next one twice as long, up to 60."""
    equal_groups: Literal["keep", "drop"] = "keep"
    """Groups whose rewards are all the same: drop: another task takes their place, and they are counted."""
    most_equal: Positive = 4
    """drop: such groups for one batch, in multiples of its groups; further ones are kept."""
    max_failures: Positive = 64
    """Groups in a row that may fail before the run ends with an error."""

    @property
    def parts(self) -> dict[str, str]:
        """Return the functions by the name of their part: their own, or with its module where that is ambiguous."""
        names = [function.rpartition(":")[2] for function in self.functions]
        return {
            function if names.count(name) > 1 else name: function
            for name, function in zip(names, self.functions, strict=True)
        }


class CurriculumSection(Section):
    """Tasks by their difficulty: those that are always or never solved are taken less often."""

    enabled: bool = False
    """Take a task of mean reward p with probability 4 p (1 - p); one that was never measured always."""
    floor: Annotated[float, Field(gt=0, le=1)] = 0.05
    """The lowest of these probabilities."""
    lowest: float = 0.0
    """The mean reward that counts as p = 0."""
    highest: float = 1.0
    """The mean reward that counts as p = 1."""


@with_tables_of_parts("explorer")
class ExplorerSection(Section):
    """What `explorer run` reads."""

    name: str = ""
    """The explorer's identity, unique in the job; host and process unless given. A restart needs the same one."""
    tasks: str = Field(default="", json_schema_extra=TASKS)
    """`explorer run`: a JSONL or Parquet file; a directory or datasets:NAME (Hugging Face); reasoning_gym:NAME."""
    prompt_key: str = "prompt"
    """The key of the prompt, text or messages; `messages` is also accepted."""
    answer_key: str = "answer"
    """The key of the answer."""
    task_sets: Annotated[tuple[TaskSetSection, ...], Field(strict=False)] = ()
    """Sets of tasks, instead of `tasks`: several at once, filters, columns, splits."""
    shuffle: bool = True
    """Shuffle the tasks of each epoch by job.seed, the identity and the epoch."""
    epochs: Count = 0
    """Passes over the tasks after which the run ends; 0 for no end."""
    max_batches: Positive | NoneText = None
    """Batches of this explorer, those before a restart included, after which the run ends."""
    groups: Positive | NoneText = None
    """Groups of a batch; data.groups unless given."""
    ahead: Count | NoneText = None
    """Steps for which batches of all explorers may wait, besides the next one; none: what the style needs."""
    patience: Seconds = 120.0
    """Seconds without a version after which a live trainer gets further batches."""
    log: Literal["debug", "info", "warning", "error"] = "info"
    """What is logged."""
    engine: InferenceSection = InferenceSection()
    """What generates."""
    follow: FollowSection = FollowSection()
    """How versions are loaded."""
    sampling: SamplingSection = SamplingSection()
    """What is generated."""
    reward: RewardSection = RewardSection()
    """What a response is worth."""
    curriculum: CurriculumSection = CurriculumSection()
    """Tasks by their difficulty: those that are always or never solved are taken less often."""
    evaluation: EvaluationSection = EvaluationSection()
    """Rollouts of held-out tasks, greedy ones unless a set says more. Named sets are in tables of their own."""

    def set_of(self, source: str, limit: int = 0) -> TaskSetSection:
        """Return the keys of a set of which only the source was given."""
        columns = {"prompt_key": self.prompt_key, "answer_key": self.answer_key}
        named = {key: value for key, value in columns.items() if key in self.model_fields_set}
        return TaskSetSection.model_validate({"source": source, "limit": limit, **named})

    @property
    def training_sets(self) -> tuple[TaskSetSection, ...]:
        """Return the sets of tasks that are played; none if drivers say what is."""
        if self.tasks:
            return (self.set_of(self.tasks),)
        return tuple(task_set for task_set in self.task_sets if not task_set.held_out)

    def held_out_set(self, tasks: str, limit: int) -> TaskSetSection:
        """Return the keys of held-out tasks: a source, or `set:` and the name of a set."""
        if not tasks.startswith(SET):
            return self.set_of(tasks, limit)
        sets = {task_set.shown_name: task_set for task_set in self.task_sets if task_set.held_out}
        name = tasks.removeprefix(SET)
        if name not in sets:
            hint = nearest(name, sets) or f'[[explorer.task_sets]] name = "{name}", held_out = true'
            raise ConfigError(f"no held-out set of tasks is called {name}", hint=hint)
        return sets[name].model_copy(update={"limit": limit or sets[name].limit})
