"""`python -m tokasaurus` is `toka`."""

import sys

from tokasaurus.cli import main

if __name__ == "__main__":
    sys.exit(main())
