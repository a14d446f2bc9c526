"""Exams: whether an engine's way of loading reaches every tensor, found out before it gets work (docs/proof.md)."""
