"""The same service without a guard: it grows with every new word. To start it here: uvicorn unguarded:app"""

from threading import Lock

import spacy
from fastapi import FastAPI
from pydantic import BaseModel

nlp = spacy.load("ja_ginza")
nlp("銀座でランチをご一緒しましょう。")
one_at_a_time = Lock()  # Sudachi, ja_ginza's tokenizer, fails when two threads use it at once

app = FastAPI()


class Page(BaseModel):
    text: str


@app.post("/entities")
def entities(page: Page) -> list[str]:
    with one_at_a_time:
        return [entity.text for entity in nlp(page.text).ents]


@app.post("/tokens")
def tokens(page: Page) -> list[str]:
    with one_at_a_time:
        return [token.text for token in nlp.make_doc(page.text)]
