"""Celery: a whole program that checks itself. docs/frameworks.md explains it."""

from celery import Celery

from modelguard import guard
from modelguard.errors import LoadFailed, Overloaded
from modelguard.frameworks import celery as modelguard_celery


class Model:
    """Stands for a real model."""

    def __call__(self, texts: list[str]) -> list[int]:
        return [len(text.split()) for text in texts]


nlp = guard(Model, reload_on=None, name="nlp")


app = Celery("words", broker="memory://", backend="cache+memory://")
modelguard_celery.install()  # workers load the model before they take a task


@nlp
def words(model: Model, text: str) -> int:
    return model([text])[0]


@app.task(bind=True, max_retries=5)
def count_words(task, text: str) -> int:
    try:
        return words(text)
    except (Overloaded, LoadFailed) as error:  # no model now
        raise task.retry(exc=error, countdown=1 + error.retry_after) from error


app.conf.task_always_eager = True  # as in tests
assert count_words.delay("two words").get() == 2
