"""The logger of the whole library."""

from __future__ import annotations

import logging

logger = logging.getLogger("modelguard")
logger.addHandler(logging.NullHandler())
