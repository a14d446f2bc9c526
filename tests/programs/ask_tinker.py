"""Ask a tinker server for its base model and print what came of it: ask_tinker.py URL SECONDS.

A process of its own: the SDK goes on repeating a request in threads that draw from the process's `random`.
"""

import json
import sys
import time

from syncd.errors import TimedOutError
from syncd.parts.tinker.session import TinkerSession

session = TinkerSession(sys.argv[1], "tml-test", float(sys.argv[2]))
begun, said = time.monotonic(), {"error": "", "hint": ""}
try:
    session.base_model()
except TimedOutError as error:
    said = {"error": str(error), "hint": error.hint}
finally:
    session.close()
print(json.dumps(said | {"seconds": time.monotonic() - begun}))
