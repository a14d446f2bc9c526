"""The version of the distribution, readable without importing anything else; between releases it ends in `.dev0`."""

__version__ = "0.2.0.dev0"
