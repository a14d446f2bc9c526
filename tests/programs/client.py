"""An explorer and then a trainer of a job that may be anything: ends with the code of what it meets."""

import sys

from syncd.errors import SyncdError
from syncd.synchronizer import Synchronizer

try:
    with Synchronizer.open(sys.argv[1], "explorer", "e9") as sync:
        sync.wait_new_model_state_dict(99, timeout=0.2)
    with Synchronizer.open(sys.argv[1], "trainer"):
        pass
except SyncdError as error:
    sys.exit(error.exit_code)
