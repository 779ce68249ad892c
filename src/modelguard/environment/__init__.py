"""What this process runs on: how much memory it holds, how much it may hold, and who hands it out."""

from __future__ import annotations

from modelguard.environment import allocator, limits, memory

__all__ = ["allocator", "limits", "memory"]
