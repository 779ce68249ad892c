"""Presidio's Flask application, held by a guard: loaded once in gunicorn's master, and renewed by a fresh fork."""

from app import create_app

from modelguard import MemoryGrowth, control, guard

analyzer = guard(create_app, reload_on=MemoryGrowth("20 MB"), prefork=True, name="presidio")
control.listen()


@analyzer
def app(flask, environ, start_response):
    return flask(environ, start_response)
