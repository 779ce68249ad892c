"""What is wrong with a service's environment, and how to put it right: what ``modelguard doctor`` runs."""

from __future__ import annotations

from modelguard.diagnosis.checks import CHECKS, Check, Finding
from modelguard.diagnosis.doctor import Report, examine
from modelguard.diagnosis.facts import Facts

__all__ = ["CHECKS", "Check", "Facts", "Finding", "Report", "examine"]
