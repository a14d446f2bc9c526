"""What an import says: lines for people."""

from collections.abc import Iterator, Mapping

from syncd.errors import plain
from trainer.parts.importing.apply import Outcome, few
from trainer.parts.importing.run import Imported


def report(imported: Imported, to: str | None) -> Iterator[str]:
    """Yield the lines that say what became of each key; `to` is the job's file, None for standard output."""
    outcome = imported.outcome
    yield from _refusals(outcome)
    yield from _notes("left to you", outcome.by_hand)
    yield from _notes("not needed here", outcome.unneeded)
    if outcome.refusals:
        count = len(outcome.refusals)
        yield f"nothing written: {count} {'key' if count == 1 else 'keys'} of {imported.table.title} cannot be mapped"
    else:
        set_count = sum(entry.is_given for entry in outcome.entries.values())
        others = len(outcome.entries) - set_count
        where = f"{to}: " if to else ""
        yield f"{where}{set_count} keys, and {others} defaults of {imported.table.title} that are not ours"


def _refusals(outcome: Outcome) -> Iterator[str]:
    if outcome.refusals:
        yield "cannot be mapped:"
    for refusal in outcome.refusals:
        yield plain(f"  {refusal.key}: {refusal.why}")
        yield plain(f"    -> {refusal.instead.replace('KEY', refusal.key)}")


def _notes(title: str, notes: Mapping[str, str]) -> Iterator[str]:
    if notes:
        yield f"{title}:"
    for why in dict.fromkeys(notes.values()):
        keys = [key for key, reason in notes.items() if reason == why]
        yield plain(f"  {few(keys)}: {why}")
