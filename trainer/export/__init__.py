"""Any step or full checkpoint as a complete Hugging Face directory: docs/export.md."""

from trainer.export.run import export

__all__ = ["export"]
