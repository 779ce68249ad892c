"""``frameworks.uwsgi`` and ``frameworks.celery`` outside their servers."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from modelguard.errors import InvalidOption, NotSupported
from modelguard.frameworks import celery, uwsgi


def server(**differences: Any) -> ModuleType:
    """What ``import uwsgi`` gives in the master of a server that fits, but for the differences."""
    fit = {
        "masterpid": lambda: 1,
        "worker_id": lambda: 0,
        "loop": None,
        "opt": {"master": True, "py-call-uwsgi-fork-hooks": True},
    }
    module = ModuleType("uwsgi")
    vars(module).update({**fit, **differences})
    return module


@pytest.mark.parametrize("module", [None, ModuleType("uwsgi")], ids=["no uwsgi", "a stub of that name"])
def test_outside_of_uwsgi_it_says_how_to_get_there(module: ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The application's module may be imported by tests: the error says how to call install() in uWSGI only."""
    monkeypatch.setitem(sys.modules, "uwsgi", module)
    with pytest.raises(NotSupported, match=r'if "uwsgi" in sys\.modules'):
        uwsgi.install()


@pytest.mark.parametrize(
    ("differences", "error", "says"),
    [
        ({"masterpid": lambda: 0}, InvalidOption, "master=False"),
        ({"worker_id": lambda: 2}, InvalidOption, "lazy-apps=True"),
        ({"opt": {"master": True}}, InvalidOption, "py-call-uwsgi-fork-hooks=False"),
        ({"loop": "gevent"}, NotSupported, "uWSGI's loop 'gevent'"),
    ],
    ids=["no master", "lazy-apps", "no fork hooks", "gevent"],
)
def test_a_uwsgi_that_cannot_share_is_refused_before_anything_is_done(
    differences: dict[str, Any], error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option that is in the way is named."""
    monkeypatch.setitem(sys.modules, "uwsgi", server(**differences))
    with pytest.raises(error, match=says):
        uwsgi.install()


def test_hooks_of_others_are_called_too() -> None:
    """Hooks of uwsgidecorators and of the application are kept."""
    called: list[str] = []
    module = server(post_fork_hook=lambda: called.append("theirs"))
    uwsgi._chain(module, "post_fork_hook", lambda: called.append("ours"))
    module.post_fork_hook()
    assert ["ours", "theirs"] == called


def test_without_celery_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard's module may be shared with programs that know no Celery."""
    monkeypatch.setitem(sys.modules, "celery", None)
    monkeypatch.setitem(sys.modules, "celery.signals", None)
    with pytest.raises(NotSupported, match="pip install celery"):
        celery.install()


def test_celerys_spawned_processes_have_nothing_to_share() -> None:
    """A start method that shares no memory is rejected by the name of its setting."""
    with pytest.raises(InvalidOption, match="worker_pool_start_method='spawn'"):
        celery._check_start_method(SimpleNamespace(pool_start_method="spawn"))
    celery._check_start_method(SimpleNamespace())


def test_celerys_limit_is_refused_where_the_parent_exceeds_it_by_itself() -> None:
    """It is compared with a peak that every process is born with."""
    pytest.importorskip("billiard")
    with pytest.raises(InvalidOption, match="worker_max_memory_per_child=1000"):
        celery._check_memory_limit(SimpleNamespace(max_memory_per_child=1000))
    celery._check_memory_limit(SimpleNamespace(max_memory_per_child=10**9))
    celery._check_memory_limit(SimpleNamespace(max_memory_per_child=None))


@pytest.mark.parametrize(("tried", "expected"), [(0.1, 4.0), (3.0, 15.0)], ids=["short", "long"])
def test_celery_waits_for_warm_ups(tried: float, expected: float) -> None:
    """Five times what the throw-away child took; never less than what is set."""
    pytest.importorskip("celery")
    conf = SimpleNamespace(worker_proc_alive_timeout=4.0)
    celery._allow_warm_ups(conf, SimpleNamespace(tried={"nlp": tried}))
    assert expected == conf.worker_proc_alive_timeout


def test_a_process_that_does_not_leave_waits_for_its_next_task() -> None:
    """And one that does leaves before it takes another."""
    answers = iter([False, True])
    wait = celery._ending_between_jobs(lambda: "task", SimpleNamespace(must_end=lambda: next(answers)), 155)
    assert "task" == wait()
    with pytest.raises(SystemExit) as ended:
        wait()
    assert 155 == ended.value.code
