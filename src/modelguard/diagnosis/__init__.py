"""Find problems in a service's environment, and how to fix them; ``modelguard doctor`` on the command line."""

from __future__ import annotations

from modelguard import _public
from modelguard.diagnosis._checks import CHECKS, Check, Finding
from modelguard.diagnosis._facts import Facts
from modelguard.diagnosis._facts_command import PATIENCE, REQUESTS, facts_of_command
from modelguard.diagnosis._facts_machine import facts_of_machine
from modelguard.diagnosis._facts_process import facts_of_process
from modelguard.diagnosis._report import DoctorReport, examine

__all__ = [
    "CHECKS",
    "PATIENCE",
    "REQUESTS",
    "Check",
    "DoctorReport",
    "Facts",
    "Finding",
    "examine",
    "facts_of_command",
    "facts_of_machine",
    "facts_of_process",
]

_public.set_module(globals())
