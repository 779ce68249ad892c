"""Every check, by its number: MG1xx the allocator, 2xx presets, 3xx memory, 4xx servers, 5xx the interpreter."""

from __future__ import annotations

from modelguard.diagnosis import checks_allocator, checks_memory, checks_presets, checks_servers
from modelguard.diagnosis.finding import Check, Finding

__all__ = ["CHECKS", "Check", "Finding"]

CHECKS: tuple[Check, ...] = (
    *checks_allocator.CHECKS,
    *checks_presets.CHECKS,
    *checks_memory.CHECKS,
    *checks_servers.CHECKS,
)
