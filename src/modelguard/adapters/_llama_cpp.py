"""Support for models of llama-cpp-python."""

from __future__ import annotations

import sys
from typing import Any

from modelguard.lifecycle._models import Adapter


class LlamaAdapter(Adapter):
    """Measures a model by its weights, which are mapped from their file and so are no private memory.

    A model frees its memory with its last reference, and llama.cpp keeps none.
    """

    def size(self, model: Any) -> int | None:
        """Bytes of all weights, as llama.cpp counts them; None if the model is closed.

        The context, with its cache of keys and values, is not in it: llama.cpp does not say how large that is.
        """
        library = sys.modules["llama_cpp"]  # it has made the model
        return None if model.model is None else int(library.llama_model_size(model.model))


ADAPTER = LlamaAdapter()
