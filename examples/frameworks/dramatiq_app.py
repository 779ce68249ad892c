"""Dramatiq: a whole program that checks itself. docs/frameworks.md explains it."""

import dramatiq
from dramatiq.brokers.stub import StubBroker
from dramatiq.errors import Retry

from modelguard import batched, guard
from modelguard.errors import DeadlineExceeded, LoadFailed, Overloaded
from modelguard.serving import deadline


class Model:
    """Stands for a real model."""

    def __call__(self, texts: list[str]) -> list[int]:
        return [len(text.split()) for text in texts]


nlp = guard(Model, reload_on=None, name="nlp")


@batched(max_size=32)
@nlp
def count(model: Model, texts: list[str]) -> list[int]:
    return model(texts)


class ModelLife(dramatiq.Middleware):
    """Each worker process loads the model before it takes a message."""

    def after_worker_boot(self, broker: dramatiq.Broker, worker: dramatiq.Worker) -> None:
        nlp.load()

    def after_worker_shutdown(self, broker: dramatiq.Broker, worker: dramatiq.Worker) -> None:
        count.close()
        nlp.close()


broker = StubBroker()  # or Redis, or RabbitMQ
broker.add_middleware(ModelLife())
dramatiq.set_broker(broker)
counts: list[int] = []


@dramatiq.actor(max_retries=5, throws=DeadlineExceeded)
def count_words(text: str, seconds: float = 10) -> None:
    try:
        with deadline(seconds):
            counts.append(count(text))
    except (Overloaded, LoadFailed) as error:  # not now: again when it says
        raise Retry(str(error), delay=1000 * round(1 + error.retry_after)) from error


worker = dramatiq.Worker(broker, worker_timeout=10)
worker.start()
count_words.send("two words")
broker.join(count_words.queue_name)
worker.join()
assert counts == [2]
worker.stop()
assert not nlp.ready
