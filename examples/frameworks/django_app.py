"""Django: a whole program that checks itself. docs/frameworks.md explains it."""

import asyncio
import logging
import logging.handlers

import django
from django.apps import AppConfig
from django.conf import settings
from django.http import HttpRequest, JsonResponse
from django.test import AsyncClient, Client
from django.urls import path

from modelguard import batched, guard


class Model:
    """Stands for a real model."""

    def __call__(self, texts: list[str]) -> list[int]:
        return [len(text.split()) for text in texts]


nlp = guard(Model, reload_on=None, name="nlp")


@batched(max_size=32)
@nlp
def count(model: Model, texts: list[str]) -> list[int]:
    return model(texts)


class WordsConfig(AppConfig):  # in apps.py
    name = __name__

    def ready(self) -> None:
        nlp.reload(wait=False)  # begins to load, and returns at once


async def get_count(request: HttpRequest) -> JsonResponse:  # in views.py
    return JsonResponse({"words": await count.aio(request.GET["text"])})


def get_count_in_a_thread(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"words": count(request.GET["text"])})


urlpatterns = [path("count", get_count), path("thread", get_count_in_a_thread)]  # in urls.py


def is_no_refusal(record: logging.LogRecord) -> bool:
    return getattr(record, "status_code", 0) not in {503, 504}


settings.configure(  # in settings.py
    INSTALLED_APPS=[f"{__name__}.WordsConfig"],
    MIDDLEWARE=["modelguard.frameworks.django.ModelGuardMiddleware"],  # before all others
    MODELGUARD={"deadline": "2s"},
    ROOT_URLCONF=__name__,
    LOGGING={
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"no refusals": {"()": "django.utils.log.CallbackFilter", "callback": is_no_refusal}},
        "loggers": {"django.request": {"filters": ["no refusals"]}},
    },
)


django.setup()
logging.getLogger("django.request").addHandler(log := logging.handlers.BufferingHandler(100))
nlp.load()  # for the test: until the load has ended
client = Client()
assert client.get("/readyz").status_code == 200
for where in ("/count", "/thread"):
    assert client.get(where, {"text": "two words"}).json() == {"words": 2}
    assert client.get(where, {"text": "two words"}, headers={"Request-Timeout": "0"}).status_code == 504


async def ask(where: str) -> int:
    answer = await AsyncClient().get(where, {"text": "two words"}, headers={"Request-Timeout": "0"})
    return answer.status_code


assert [asyncio.run(ask(where)) for where in ("/count", "/thread")] == [504, 504]
count.close()
nlp.close()
closed = client.get("/count", {"text": "two words"})
assert (closed.status_code, "retry-after" in closed.headers) == (503, True)
assert client.get("/nowhere").status_code == 404
assert [record.getMessage() for record in log.buffer] == ["Not Found: /nowhere"]
