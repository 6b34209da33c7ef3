"""`python -m relvit.cli`."""

import sys

from relvit.cli import main

if __name__ == "__main__":
    sys.exit(main())
