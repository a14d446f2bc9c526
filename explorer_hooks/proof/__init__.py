"""Proof: whether an engine runs a version, by its answers to probes and the checksums of its parameters."""
