"""The tables [explorer.agent] and [explorer.gateway] of the job's file. Needs pydantic alone.

A key's description is its only documentation: the schema and docs/configuration.md are made of it.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from syncd.jobfile.roles import RunnerSection
from syncd.jobfile.sections import CODE, PATH, Count, Names, Positive, Seconds, Section


class GatewaySection(Section):
    """The OpenAI-style endpoint of `explorer serve` and of `[explorer.agent]`."""

    listen: str = ""
    """HOST:PORT; serve: 127.0.0.1:8100 unless given, run: a free port; the log names it."""
    directory: str = Field(default="", json_schema_extra=PATH)
    """Of the journal and the token, on a disk of this host; below ~/.local/state/syncd unless given."""
    hold: Seconds = 300.0
    """Seconds that a turn waits for an engine that is away or loads a version; then the answer is 503."""
    idle: Seconds = 3600.0
    """serve: seconds without a request after which an unfinished group is dropped; run: `agent.timeout` counts."""
    max_turns: Positive = 64
    """Turns of a session at most."""
    history: Literal["exact", "template"] = "exact"
    """exact: a turn continues the recorded tokens; template: only if the chat template writes the same ones."""
    segments: Literal["all", "last"] = "all"
    """Which segments of a rollout are trained; last: the one alone that ends in its last turn."""
    tool_format: Literal["auto", "hermes", "qwen3_coder", "glm45", "mistral", "llama3", "none"] = "auto"
    """How the model writes calls of tools; auto: as its chat template writes one. none: answers are text alone."""
    harmless_fields: Literal["tolerate", "refuse"] = "tolerate"
    """Fields of requests that ask for what agents can do without, such as `strict`; tolerate: without effect."""


ENVIRONMENTS = "verifiers:"  # what `explorer.agent.environment` begins with


class AgentSection(RunnerSection):
    """The agent that plays the tasks, in place of one response to each prompt."""

    command: str = Field(default="", json_schema_extra=CODE)
    """Started for each rollout, split into words as a shell does; its last line is the reward as JSON."""
    function: str = Field(default="", json_schema_extra=CODE)
    """package.module:function, called for each rollout with `base_url`, `api_key` and `task`; returns the reward."""
    environment: str = Field(default="", json_schema_extra=CODE)
    """verifiers:NAME, an environment of verifiers; it has tasks, tools and rewards of its own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """environment: verifiers' configuration of it, its `env` table: `taskset`, its roles, its own keys."""
    select: dict[str, Any] = Field(default_factory=dict)
    """environment: which of its tasks are played, verifiers' `select` table: `limit`, `include`, `exclude`."""
    episode: Literal["rollout", "group"] = "rollout"
    """environment: what an episode is; group: all rollouts of a group, which it scores together."""
    python: str = Field(default="", json_schema_extra=CODE)
    """environment: the interpreter that has verifiers; this one unless given."""
    processes: Positive = 1
    """environment: processes that share the episodes."""
    concurrency: Positive = 8
    """Rollouts, of an environment episodes, that are played at the same time."""
    timeout: Seconds = 600.0
    """Seconds that one of them may take; then the agent is killed, and the attempt abandoned."""
    retries: Count = 1
    """Further attempts at a rollout whose agent failed; after the last one the group is dropped."""
    reward: Literal["agent", "function"] = "agent"
    """Where rewards come from: the agent itself, or `[explorer.reward]`, which reads the last answer."""
    reward_range: tuple[float, float] = Field(default=(0.0, 1.0), strict=False)
    """The least and the largest reward that the agent may give; of an environment any unless given."""
    http_reward: bool = True
    """Let the agent, and so all that it starts, give its reward by HTTP; the first one counts."""
    answer: Literal["scorer", "agent"] = "scorer"
    """command: who gets the task's answer: what gives the reward; agent: the command in any case."""
    pass_env: Names = ()
    """Further variables of the explorer that the agent gets; secrets are not among the usual ones."""

    @property
    def is_given(self) -> bool:
        return bool(self.command or self.function or self.environment)

    @property
    def has_own_tasks(self) -> bool:
        return bool(self.environment)

    @property
    def measured_as(self) -> Sequence[str]:
        return self.command, self.function, self.reward

    @property
    def rewards_by_http(self) -> bool:
        return bool(self.command or self.function) and self.reward == "agent" and self.http_reward

    @property
    def allowed_rewards(self) -> tuple[float, float]:
        """Return the least and the largest reward that it may give."""
        is_bound = self.reward == "agent" and (
            self.command or self.function or "reward_range" in self.model_fields_set
        )
        return self.reward_range if is_bound else (-math.inf, math.inf)
