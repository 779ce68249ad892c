"""The same service, guarded. To start it here: serve run app:app"""

import os

import spacy
from spacy.language import Language

from modelguard import MemoryGrowth, Uses, batched, guard
from modelguard.frameworks import ray

# spaCy keeps every word that it has ever seen. A replica that has grown is replaced, and so is one that has computed so
# many batches; one at a time.
nlp = guard(
    lambda: spacy.blank("en"),
    reload_on=MemoryGrowth("500 MB") | Uses(int(os.environ.get("MAX_USES", "1_000_000"))),
    warmup=lambda model: model("So that no request pays for the first call."),
    name="nlp",
)


@batched(max_size=8, max_queue=128, deadline="2s")  # what waits is bounded, and so is how long
@nlp  # hands the model in
def words(model: Language, texts: list[str]) -> list[int]:
    return [len(doc) for doc in model.pipe(texts)]


app = ray.deployment(
    words,
    num_replicas=2,
    ray_actor_options={"num_cpus": 0.5},
    min_lifetime="5s",
    health_check_period_s=1,  # a replica leaves three failed checks after a policy has become due
).bind()
