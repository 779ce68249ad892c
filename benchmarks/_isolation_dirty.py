"""The applications of gunicorn's dirty workers."""

from __future__ import annotations

from typing import Any

import _isolated
from gunicorn.dirty import DirtyApp


class Echo(DirtyApp):
    def call(self, value: Any) -> Any:
        return value


class Entities(DirtyApp):
    def init(self) -> None:
        self._model = _isolated.load_spacy()
        self._model(_isolated.TEXT)

    def call(self, text: str) -> list[Any]:
        return list(_isolated.find_entities(self._model, text))
