"""What a person sees while it trains: a live display on a terminal, plain lines otherwise."""

from trainer.reporting.display import Progress

__all__ = ["Progress"]
