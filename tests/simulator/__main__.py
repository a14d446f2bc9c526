"""`python -m simulator`."""

import sys

from simulator.run import main

if __name__ == "__main__":
    sys.exit(main())
