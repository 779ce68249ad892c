"""Find problems in a service's environment (``modelguard doctor``), and what makes memory grow (``diagnose``)."""

from modelguard import _public
from modelguard.diagnosis._diagnose import diagnose
from modelguard.diagnosis._doctor_report import CHECKS, DoctorReport, examine
from modelguard.diagnosis._facts import Check, Facts, Finding
from modelguard.diagnosis._facts_command import PATIENCE, REQUESTS, facts_of_command
from modelguard.diagnosis._facts_process import facts_from_inside, facts_of_machine, facts_of_process
from modelguard.diagnosis._growth_causes import Cause, GrowthReport, Measured, Spread, Trial, Trials
from modelguard.diagnosis._watch import Watch, diagnose_process, watch

__all__ = [
    "CHECKS",
    "PATIENCE",
    "REQUESTS",
    "Cause",
    "Check",
    "DoctorReport",
    "Facts",
    "Finding",
    "GrowthReport",
    "Measured",
    "Spread",
    "Trial",
    "Trials",
    "Watch",
    "diagnose",
    "diagnose_process",
    "examine",
    "facts_from_inside",
    "facts_of_command",
    "facts_of_machine",
    "facts_of_process",
    "watch",
]

_public.set_module(globals())
