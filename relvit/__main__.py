"""`python -m relvit`, as `torchrun -m relvit` calls it."""

import sys

from relvit_start import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
