"""Any step or full checkpoint as a Hugging Face directory that stands for itself: docs/export.md."""

from trainer.export.run import export

__all__ = ["export"]
