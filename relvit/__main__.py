"""`python -m relvit`, as `torchrun -m relvit` calls it."""

import sys

from relvit.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
