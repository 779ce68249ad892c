"""What every test shares."""

from __future__ import annotations

import os
import signal
import tempfile

from hypothesis import settings

# The same examples in every run, so that a red run is the change's own doing, and no verdict on speed.
# To explore instead: make test ARGS="--hypothesis-profile=default".
settings.register_profile("modelguard", deadline=None, derandomize=True)
settings.load_profile("modelguard")

# One reload at a time on a host is a promise of the product; runs of this suite beside each other need not keep it.
_RUNTIME = tempfile.TemporaryDirectory(prefix="modelguard-tests-", ignore_cleanup_errors=True)
os.environ["MODELGUARD_RUNTIME_DIR"] = _RUNTIME.name

# A shell that runs the tests in the background has them ignore Ctrl-C, and their children would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
