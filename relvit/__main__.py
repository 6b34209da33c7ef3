"""`python -m relvit`, as `torchrun -m relvit` calls it."""

import sys

from relvit_start import answer, run

if __name__ == "__main__":
    # `answer` needs only the packages of the core, so `--help`, `--version` and the error about an unknown command also
    # work if the packages of the application are missing.
    status: int | None = answer(sys.argv[1:])
    sys.exit(run(sys.argv[1:]) if status is None else status)
