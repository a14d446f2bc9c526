"""A stage copies a step while the trainer still writes it (`syncd follow --early`, docs/large-models.md)."""
