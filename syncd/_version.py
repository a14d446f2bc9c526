"""The version of the distribution, readable without importing anything else."""

__version__ = "0.1.0"
