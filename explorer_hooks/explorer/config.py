"""Every key of the [explorer] table, with its type, its default and what it means. Frozen once it is read.

docs/explorer-run.md is made of the descriptions by `explorer config docs`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from syncd.jobfile.sections import (
    Count,
    DataSection,
    JobFile,
    NoneText,
    Positive,
    Seconds,
    Section,
    SyncSection,
)


class InferenceSection(Section):
    """What generates."""

    kind: Literal["transformers", "vllm", "sglang", "tinker"] = "transformers"
    """transformers: a model in this process. vllm, sglang: a server, by its completions API. tinker: by its SDK."""
    address: str = ""
    """vllm, sglang, tinker: the server's URL, http://127.0.0.1:8000; with a command a free port unless given."""
    model: str = ""
    """vllm, sglang, tinker: what requests call the (base) model; what the server names unless given."""
    reload: Literal["in_place", "restart"] = "in_place"
    """vllm, sglang: in_place: it reads each version; restart: the explorer owns the server, and starts it on each."""
    command: str = ""
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

    stage: str = ""
    """A directory of this host for one copy of each version, shared by all explorers on it: /dev/shm/syncd."""
    verify: Literal["size", "header", "content"] = "content"
    """The check of a version before the engine is touched; content: every byte against its digest."""
    retries: Count = 2
    """Further attempts of a load that failed."""
    max_lag: Count | NoneText = None
    """Steps that the engine may be behind what is published; work waits while it is further behind."""
    reload_test: bool = True
    """Have an engine on the job's start model first reload that, to show that it can."""


class SamplingSection(Section):
    """What is generated. Rollouts are sampled from the whole distribution at `algorithm.temperature`."""

    max_tokens: Positive = 1024
    """Tokens of a response at most."""
    max_prompt_tokens: Positive = 4096
    """Tokens of a prompt at most; tasks with longer ones are skipped and counted."""


class TeacherSection(Section):
    """A served model that is asked for its log-prob of each token of each response."""

    kind: Literal["vllm", "sglang"] = "vllm"
    """The server: vllm is asked by its completions API, sglang by /generate."""
    address: str = ""
    """The server's URL, such as http://127.0.0.1:8001; no teacher unless given."""
    model: str = ""
    """What requests and experiences call the teacher; what the server names first unless given."""
    token_env: str = ""
    """The environment variable that holds the server's API key."""
    concurrency: Positive = 8
    """Groups that are sent to it at the same time, each in one request."""
    timeout: Seconds = 120.0
    """Seconds that one request may take."""
    retries: Count = 4
    """Retries of a request that failed, each after a longer pause."""
    required: bool = True
    """Drop a group of which it gives no log-probs, and count it; false: write the group without."""


class RewardSection(Section):
    """What a response is worth."""

    function: str = "exact_match"
    """exact_match, math, or package.module:function, called with prompt, response and task."""
    timeout: Seconds = 30.0
    """Seconds that one call may take."""
    workers: Positive = 1
    """Processes that score at the same time; exact_match and math need none."""
    max_failures: Positive = 64
    """Groups in a row that may be dropped before the run ends with an error."""


class GatewaySection(Section):
    """The OpenAI-style endpoint of `explorer serve` and of `[explorer.agent]`."""

    listen: str = ""
    """HOST:PORT; serve: 127.0.0.1:8100 unless given, run: a free port; the log names it."""
    directory: str = ""
    """Of the journal and the token, on a disk of this host; below ~/.local/state/syncd unless given."""
    hold: Seconds = 300.0
    """Seconds that a turn waits for an engine that is away or loads a version; then the answer is 503."""
    idle: Seconds = 3600.0
    """Seconds without a request after which an unfinished group is dropped."""
    max_turns: Positive = 64
    """Turns of a session at most."""
    history: Literal["exact", "template"] = "exact"
    """exact: a turn continues the recorded tokens; template: only if the chat template writes the same ones."""
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "none"] = "auto"
    """How the model writes calls of tools; auto: as its chat template shows."""


class AgentSection(Section):
    """The agent that plays the tasks, in place of one response to each prompt."""

    command: str = ""
    """Started for each rollout, split into words as a shell does; its last line is the reward as JSON."""
    function: str = ""
    """package.module:function, called for each rollout with `base_url`, `api_key` and `task`; returns the reward."""
    concurrency: Positive = 8
    """Rollouts that are played at the same time."""
    timeout: Seconds = 600.0
    """Seconds that a rollout may take; then the agent is killed, and the attempt abandoned."""
    retries: Count = 1
    """Further attempts at a rollout whose agent failed; after the last one the group is dropped."""
    reward: Literal["agent", "function"] = "agent"
    """Where rewards come from: the agent itself, or `[explorer.reward]`, which reads the last answer."""

    @property
    def is_given(self) -> bool:
        """Return whether an agent plays the tasks."""
        return bool(self.command or self.function)


class EvaluationSection(Section):
    """Greedy rollouts of held-out tasks, one each."""

    tasks: str = ""
    """JSONL of the held-out tasks; none unless given."""
    every: Count = 1
    """Versions from one evaluation to the next; 0 for none."""
    limit: Count = 0
    """Tasks of the file that are used, from its beginning; 0 for all."""


class ExplorerSection(Section):
    """What `explorer run` reads."""

    name: str = ""
    """The explorer's identity, unique in the job; host and process unless given. A restart needs the same one."""
    tasks: str = ""
    """JSONL for `explorer run`: `prompt` (text, or a list of chat messages), `answer`, `id`, anything else."""
    prompt_key: str = "prompt"
    """The key of the prompt in the file; `messages` is also accepted."""
    answer_key: str = "answer"
    """The key of the answer in the file."""
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
    teacher: TeacherSection = TeacherSection()
    """A served model that is asked for its log-prob of each token of each response."""
    reward: RewardSection = RewardSection()
    """What a response is worth."""
    evaluation: EvaluationSection = EvaluationSection()
    """Greedy rollouts of held-out tasks."""
    agent: AgentSection = AgentSection()
    """The agent that plays the tasks, in place of one response to each prompt."""
    gateway: GatewaySection = GatewaySection()
    """The OpenAI-style endpoint of `explorer serve` and of `[explorer.agent]`."""


Free = Annotated[dict[str, Any], Field(default_factory=dict)]
"""A table that others read and check."""


class ExplorerFile(JobFile):
    """The whole file, as an explorer sees it."""

    data: DataSection = DataSection()
    """Where samples come from."""
    sync: SyncSection = SyncSection()
    """How weights reach explorers."""
    explorer: ExplorerSection
    """What `explorer run` reads."""
    algorithm: Free
    """The trainer's; of it explorers read `temperature`."""
    critic: Free
    """The trainer's."""
    engine: Free
    """The trainer's."""
    trainer: Free
    """The trainer's."""
    selection: Free
    """The trainer's."""
    monitor: Free
    """The trainer's."""
    daemon: Free
    """The daemon's."""
    stages: tuple[dict[str, Any], ...] = Field(default=(), strict=False)
    """The trainer's."""

    @property
    def groups(self) -> int:
        """Return the groups of a batch."""
        return self.explorer.groups or self.data.groups

    @property
    def temperature(self) -> float:
        """Return the temperature that the trainer expects; checked when the file is read."""
        return float(self.algorithm.get("temperature", 1.0))
