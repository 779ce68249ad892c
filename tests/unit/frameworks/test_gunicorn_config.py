"""The module is read by gunicorn as a configuration: each of its names may be a setting."""

from __future__ import annotations

import pytest

config = pytest.importorskip("gunicorn.config")


def test_it_sets_what_it_means_to_set_and_nothing_else() -> None:
    """No helper or import has the name of a setting; ``import *`` gives the settings and nothing more."""
    from modelguard.frameworks import gunicorn as ours

    settings = {name for name in vars(ours) if name in config.KNOWN_SETTINGS or name in config.Config().settings}
    assert set(ours.__all__) == settings


def test_gunicorn_takes_the_settings() -> None:
    """Every one of them is valid: hooks have the right number of parameters."""
    from modelguard.frameworks import gunicorn as ours

    made = config.Config()
    for name in ours.__all__:
        made.set(name, getattr(ours, name))
    assert (True, True) == (made.preload_app, made.control_socket_disable)
