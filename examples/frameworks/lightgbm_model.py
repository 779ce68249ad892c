"""LightGBM: a whole program that checks itself. docs/frameworks.md explains it."""

import lightgbm
import numpy as np

from modelguard import Modified, batched, guard

features, labels = np.random.default_rng(0).random((200, 4)), np.arange(200) % 2
options = {"objective": "binary", "verbose": -1, "num_threads": 1}
lightgbm.train(options, lightgbm.Dataset(features, labels), 5).save_model("model.txt")  # stands for a training job

booster = guard(
    lambda: lightgbm.Booster(model_file="model.txt"),
    reload_on=Modified("model.txt"),
    validate=lambda model: model.num_feature() == 4,
    name="booster",
)


@batched(max_size=256)
@booster
def score(model: lightgbm.Booster, rows: list[list[float]]) -> list[float]:
    return model.predict(np.array(rows), num_threads=2).tolist()


with booster, score:
    assert 0 < score([0.1, 0.2, 0.3, 0.4]) < 1
