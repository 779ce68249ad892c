"""The same API, whose model is in forks of one process instead of spawned workers, each replaced when it has grown."""

from importlib import import_module

from litserve_api import Words

from modelguard import MemoryGrowth, control, guard, isolate


@isolate(workers=4)
@guard(lambda: import_module("spacy").blank("en"), reload_on=MemoryGrowth("10 MB"))
def words(nlp, text):
    return [token.text for token in nlp(text)]


class Cured(Words):
    def setup(self, device):
        control.listen()
        words.load()

    async def predict(self, text):
        return await words.aio(text)
