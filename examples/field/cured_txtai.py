"""txtai's API class with models of a guard, loaded once in gunicorn's master."""

import os

from txtai.api import API, app  # noqa: F401 - what gunicorn serves

from modelguard import MemoryGrowth, control, guard

loaded = guard(lambda: API(os.environ["CONFIG"]), reload_on=MemoryGrowth("100 MB"), prefork=True, name="txtai")
control.listen()


class Shared(API):
    def __init__(self, config):
        pass

    @loaded
    def transform(self, api, text, category=None, index=None):
        return api.transform(text, category, index)
