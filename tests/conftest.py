"""What every test shares."""

from __future__ import annotations

from hypothesis import settings

# The same examples in every run, so that a red run is the change's own doing, and no verdict on speed.
# To explore instead: make test ARGS="--hypothesis-profile=default".
settings.register_profile("modelguard", deadline=None, derandomize=True)
settings.load_profile("modelguard")
