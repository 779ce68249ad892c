"""All checks, by number: MG1xx the allocator, 2xx presets, 3xx memory, 4xx servers, 5xx the interpreter."""

from __future__ import annotations

from modelguard.diagnosis import (
    _checks_allocator,
    _checks_interpreter,
    _checks_memory,
    _checks_presets,
    _checks_servers,
)
from modelguard.diagnosis._findings import Check, Finding

__all__ = ["CHECKS", "Check", "Finding"]

CHECKS: tuple[Check, ...] = (
    *_checks_allocator.CHECKS,
    *_checks_presets.CHECKS,
    *_checks_memory.CHECKS,
    *_checks_servers.CHECKS,
    *_checks_interpreter.CHECKS,
)
