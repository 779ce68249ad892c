"""scikit-learn: a whole program that checks itself. docs/frameworks.md explains it."""

import joblib
import numpy as np
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression

from modelguard import Modified, batched, guard

features, labels = np.random.default_rng(0).random((200, 4)), np.arange(200) % 3
joblib.dump(LogisticRegression().fit(features, labels), "model.joblib")  # stands for a training job


def load() -> LogisticRegression | RandomForestClassifier:
    return joblib.load("model.joblib")


classifier = guard(
    load,
    reload_on=Modified("model.joblib"),
    validate=lambda model: model.n_features_in_ == 4,
    name="classifier",
)


@batched(max_size=256)
@classifier
def classify(model: LogisticRegression, rows: list[list[float]]) -> list[int]:
    return model.predict(np.array(rows)).tolist()


with classifier, classify:
    assert classify([0.1, 0.2, 0.3, 0.4]) in (0, 1, 2)
