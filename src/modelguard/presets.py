"""Sets of environment variables for model servers, and whether they took effect."""

from __future__ import annotations

from modelguard import _public
from modelguard.environment._effect import State
from modelguard.environment._knobs import Knob, When
from modelguard.environment._presets import ApplyReport, Format, Outcome, Preset, describe, get, names

__all__ = ["ApplyReport", "Format", "Knob", "Outcome", "Preset", "State", "When", "describe", "get", "names"]

_public.set_module(globals())
