"""`python -m tokasaurus` runs `toka`."""

import sys

from tokasaurus.cli import main

if __name__ == "__main__":
    sys.exit(main())
