"""`python -m relvit`, as `torchrun -m relvit` calls it."""

import sys

from relvit_start import answer, run

if __name__ == "__main__":
    # Without the packages of the application, `relvit_start` still answers `--help`, `--version` and unknown commands.
    status: int | None = answer(sys.argv[1:])
    sys.exit(run(sys.argv[1:]) if status is None else status)
