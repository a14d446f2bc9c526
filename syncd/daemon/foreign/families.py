"""Every layout of others."""

from syncd.daemon.foreign.huggingface import HUGGINGFACE
from syncd.daemon.foreign.prime import PRIME
from syncd.daemon.foreign.tinker import TINKER
from syncd.daemon.foreign.verl import ADAPTER, EXPORT, FSDP, MEGATRON, TRINITY

LAYOUTS = (TINKER, TRINITY, FSDP, MEGATRON, EXPORT, ADAPTER, PRIME, HUGGINGFACE)
"""The first that knows a directory has it."""
