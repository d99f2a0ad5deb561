"""``python -m lapwing`` is the command line."""

import sys

from lapwing.cli import main

if __name__ == "__main__":
    sys.exit(main())
