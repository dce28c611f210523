"""``python -m hybridpp``, where the command is not installed."""

import sys

from hybridpp.cli import main

if __name__ == "__main__":
    sys.exit(main())
