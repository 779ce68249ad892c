"""The runtime itself, in a module of its own: MLServer imports it again at each load."""

from cured_mlserver import answer
from mlserver_sklearn import SKLearnModel


class Shared(SKLearnModel):
    async def load(self):
        return await answer.areload() is None

    async def predict(self, request):
        return await answer(SKLearnModel(self.settings), request)
