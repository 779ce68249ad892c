"""``python -m modelguard`` is the command ``modelguard``."""

from __future__ import annotations

import sys

from modelguard.cli import main

if __name__ == "__main__":
    sys.exit(main())
