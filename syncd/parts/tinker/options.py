"""What `engine.options` holds for the engine `tinker`; trainer and explorers check it. Needs pydantic alone."""

from typing import Literal

from pydantic import Field

from syncd.jobfile.sections import Positive, Seconds, Section


class TinkerOptions(Section):
    """A tinker server, and what is trained and published there."""

    url: str = Field(pattern="^https?://", examples=["http://127.0.0.1:8000"])
    """The server's address."""
    key_env: str = "TINKER_API_KEY"
    """The environment variable that holds the API key."""
    base_model: str = ""
    """What the server calls the model of `model.path`; its only one unless given."""
    rank: Positive = 32
    """The rank of the adapter that is trained."""
    publish: Literal["remote", "lora"] = "remote"
    """What a step is: remote, the address of the weights on the server; lora, the adapter itself."""
    reduction: Literal["mean", "sum"] = "mean"
    """How the server makes one number of the losses of tokens: mean, over those of each row, then over rows; sum."""
    timeout: Seconds = 600.0
    """Seconds that one call to the server may take."""
