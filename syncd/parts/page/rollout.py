"""One segment of a rollout with the text, log-prob and version of each token, a bounded part of it at a time."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from syncd.errors import NotReadyError, SyncdError, storage_error
from syncd.parts.page.document import bounded
from syncd.parts.page.poller import SingleCall
from syncd.parts.page.rollouts import SCHEMA, BatchName, read_batch
from syncd.parts.page.token_text import TokenText, texts
from syncd.protocol.disk import MISSING
from syncd.protocol.layout import Job, is_identity

if TYPE_CHECKING:
    from syncd.experience.model import Experience

Document = dict[str, Any]

MOST_TOKENS = 2000  # tokens of a prompt, and of a response, in one answer

_DIGITS = 15


class RolloutReader:
    """Answers `/rollout.json`: reads in a thread, one batch at a time."""

    def __init__(self, open_job: Callable[[], Job]) -> None:
        self._open = open_job
        self._text: TokenText | None = None
        self._calls: SingleCall[Document] = SingleCall()

    def answer(self, query: Mapping[str, str], patience: float) -> Document | None:
        """Return a segment of a rollout, None if the query names none.

        Args:
            query: `explorer`, `batch`, `row` (of the rollout's first segment), `segment`, and `from`: the first token
                of the response to be shown.
            patience: Seconds to wait for the reading; beyond them the state is `reading`.
        """
        numbers = {name: query.get(name, "0") for name in ("batch", "row", "segment", "from")}
        explorer = query.get("explorer", "")
        if not is_identity(explorer) or not all(_is_number(text) for text in numbers.values()):
            return None
        batch, row, segment, start = map(int, numbers.values())
        key = (explorer, batch, row, segment, start)
        document: Document = {"state": "reading"}
        try:
            read = self._calls.result(
                key, lambda: self._read(BatchName(explorer, batch), row + segment, start), patience
            )
            document = {"state": "ready", **read} if read is not None else document
        except SyncdError as error:
            document = {"state": "failed", "error": {"message": str(error), "hint": error.hint}}
        except OSError as error:
            failed = storage_error(error, None)
            document = {"state": "failed", "error": {"message": str(failed), "hint": failed.hint}}
        return {"schema_version": SCHEMA, **document}

    def _read(self, batch: BatchName, row: int, start: int) -> Document:
        job = self._open()
        try:
            experiences, _, is_archived = read_batch(job, batch)
        except MISSING:
            raise NotReadyError("the trainer has used this batch, and it was not kept") from None
        if row >= len(experiences):
            raise NotReadyError(f"the batch has {len(experiences)} rows, and row {row} is asked for")
        self._text = self._text or TokenText(job)
        tokenizer, missing = self._text.tokenizer()
        shown = segment_document(experiences[row], start, tokenizer)
        return {**shown, "archived": is_archived, "text_missing": missing}


def segment_document(experience: "Experience", start: int, tokenizer: Any) -> Document:
    """Return what the page shows of a segment from token `start` of the response on; no texts without a tokenizer."""
    length, prompt = len(experience.logprobs), experience.prompt_length
    start = min(start, length)
    end = min(start + MOST_TOKENS, length)
    segment: Document = bounded(
        {
            "task": experience.task,
            "group": experience.group,
            "rollout": experience.rollout,
            "reward": experience.reward,
            "segment": experience.segment,
            "segments": experience.segments,
            "created_at": experience.created_at,
            "info": dict(experience.info),
        }
    )
    return {
        **segment,
        "turn_rewards": [list(turn) for turn in (experience.turn_rewards or ())][:MOST_TOKENS],
        "prompt": {"length": prompt, **_tokens(experience, tokenizer, 0, min(prompt, MOST_TOKENS))},
        "response": {
            "length": length,
            "from": start,
            **_tokens(experience, tokenizer, prompt + start, prompt + end),
            "versions": _versions(experience, start, end),
            "logprobs": _rounded(experience.logprobs[start:end]),
            "teacher_logprobs": _rounded(experience.teacher_logprobs[start:end])
            if experience.teacher_logprobs
            else None,
            "chosen": list(map(int, experience.action_mask[start:end])),
            "unproven": list(map(int, experience.unproven[start:end])) if experience.unproven else None,
        },
    }


def _tokens(experience: "Experience", tokenizer: Any, start: int, end: int) -> Document:
    ids = list(experience.tokens[start:end])
    return {
        "ids": ids,
        "texts": texts(tokenizer, list(experience.tokens), start, end) if tokenizer is not None else None,
    }


def _versions(experience: "Experience", start: int, end: int) -> list[list[int]]:
    """Return the versions of a part of the response: index of the first token, generation and step of each span."""
    spans = list(experience.spans)
    ends = [span.start for span in spans[1:]] + [len(experience.logprobs)]
    return [
        [max(span.start, start), span.generation, span.step]
        for span, until in zip(spans, ends, strict=True)
        if span.start < end and until > start
    ]


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 5) for value in values]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS
