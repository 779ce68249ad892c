"""The model of MLServer's runtime for scikit-learn, in forks of one process instead of spawned workers."""

import joblib

from modelguard import guard, isolate


@isolate(workers=4)
@guard(lambda: joblib.load("model.joblib"), reload_on=None)
async def answer(model, runtime, request):
    runtime._model = model
    return await runtime.predict(request)
