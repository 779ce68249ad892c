"""XGBoost: a whole program that checks itself. docs/frameworks.md explains it."""

import numpy as np
import xgboost

from modelguard import Modified, batched, guard

features, labels = np.random.default_rng(0).random((200, 4)), np.arange(200) % 2
training = {"objective": "binary:logistic", "nthread": 1}
xgboost.train(training, xgboost.DMatrix(features, labels), 5).save_model("model.ubj")  # stands for a training job

booster = guard(
    lambda: xgboost.Booster({"nthread": 2}, model_file="model.ubj"),
    reload_on=Modified("model.ubj"),
    validate=lambda model: model.num_features() == 4,
    name="booster",
)


@batched(max_size=256)
@booster
def score(model: xgboost.Booster, rows: list[list[float]]) -> list[float]:
    return model.inplace_predict(np.array(rows)).tolist()


with booster, score:
    assert 0 < score([0.1, 0.2, 0.3, 0.4]) < 1
