"""The service as it was first written, with Ray's own batching. To start it here: serve run unguarded:app"""

import spacy
from ray import serve
from starlette.requests import Request


@serve.deployment(name="words", num_replicas=2, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.5})
class Words:
    def __init__(self) -> None:
        self.nlp = spacy.blank("en")

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.05)
    async def words(self, texts: list[str]) -> list[int]:
        return [len(doc) for doc in self.nlp.pipe(texts)]

    async def __call__(self, request: Request) -> int:
        count: int = await self.words(await request.json())
        return count


app = Words.bind()
