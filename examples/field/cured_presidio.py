"""Presidio's Flask application, held by a guard: loaded once in gunicorn's master, and renewed by a fresh fork."""

from app import create_app

from modelguard import MemoryGrowth, control, guard


def warm_up(flask):
    flask.test_client().post("/analyze", json={"text": "東京の田中さん", "language": "ja"})


analyzer = guard(create_app, reload_on=MemoryGrowth("20 MB"), warmup=warm_up, prefork=True, name="presidio")
control.listen()


@analyzer
def app(flask, environ, start_response):
    return flask(environ, start_response)
