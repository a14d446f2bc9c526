"""Weights through the memory of a host that trainer and explorer share."""
