"""Run the command line by ``python -m lapwing``."""

import sys

from lapwing.cli import main

if __name__ == "__main__":
    sys.exit(main())
