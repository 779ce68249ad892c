"""The service as it was first written. To start it here: gunicorn -c unguarded.conf.py unguarded:app"""

import torch
from fastapi import FastAPI
from pydantic import BaseModel, Field
from voice import encode, load

voice = load()

app = FastAPI()


class Page(BaseModel):
    text: str = Field(min_length=1, max_length=4000)


@app.post("/speak")
def speak(page: Page) -> list[float]:
    with torch.inference_mode():
        return voice(encode(page.text))[0].tolist()
