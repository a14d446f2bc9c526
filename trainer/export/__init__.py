"""Any step or full checkpoint as a complete Hugging Face directory: docs/checkpoints.md#export-a-model."""

from trainer.export.run import export

__all__ = ["export"]
