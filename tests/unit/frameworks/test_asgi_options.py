"""``frameworks.asgi``: invalid options."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.frameworks.asgi_by_hand import fine

from modelguard import guard
from modelguard.errors import InvalidOption
from modelguard.frameworks.asgi import ModelGuardMiddleware


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("deadline", value) for value in (0, -1, "soon", "2", float("nan"), float("inf"), True, object())),
        *(("livez", value) for value in ("", "livez", 3, b"/livez")),
        *(("readyz", value) for value in ("", "readyz", 3)),
        *(("timeout_header", value) for value in ("", "a b", "a:b", "Ø", "a\r\nb", 3, b"a")),
        *(("guards", value) for value in ([1], [None], 5, "ab")),
        ("detail", "yes"),
        *(("fair_by", value) for value in ("", "a b", "a\r\nb", 3, b"X-Tenant", ["X-Tenant"])),
        *(("priority", value) for value in ("X-Priority", 1)),
    ],
)
def test_an_invalid_option_is_rejected_by_name(option: str, value: Any) -> None:
    """When the application is made, not at the first request."""
    with pytest.raises(InvalidOption, match=option):
        ModelGuardMiddleware(fine, **{option: value})


def test_a_guard_in_place_of_a_list_of_guards_is_rejected_by_name() -> None:
    """The error names the option."""
    with pytest.raises(InvalidOption, match="guards"):
        ModelGuardMiddleware(fine, guards=guard(dict, reload_on=None))


def test_an_unknown_option_is_rejected_by_name() -> None:
    """The error of a misspelt option names the middleware and the option."""
    with pytest.raises(TypeError, match=r"ModelGuardMiddleware.*unexpected keyword argument 'timeout'"):
        ModelGuardMiddleware(fine, timeout="2s")  # type: ignore[call-arg]
