"""Which engine the installed release of verl is tested behind, and what it lacks."""

from importlib.metadata import PackageNotFoundError, version

from trainer.config.algorithms import LOSSES
from trainer.engines.verl.release import LEGACY, RELEASES, Lacks, installed_release

try:
    IS_LEGACY = version("verl") == LEGACY
    LACKS = RELEASES["0.8" if IS_LEGACY else installed_release()]
except PackageNotFoundError:
    IS_LEGACY, LACKS = False, Lacks()

ENGINE = "verl_legacy" if IS_LEGACY else "verl"
USABLE_LOSSES = tuple(name for name in LOSSES if name not in LACKS.losses)
