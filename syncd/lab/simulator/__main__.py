"""`python -m syncd.lab.simulator`."""

import sys

from syncd.lab.simulator.run import main

if __name__ == "__main__":
    sys.exit(main())
