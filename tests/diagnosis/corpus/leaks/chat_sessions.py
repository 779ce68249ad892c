"""A chat keeps the past keys and values of each session, and no session ever ends."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import ClassVar

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
torch.manual_seed(1)
config = LlamaConfig(
    vocab_size=200,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
)


class Chat:
    sessions: ClassVar[dict[str, DynamicCache]] = {}

    def __init__(self) -> None:
        self.model = LlamaForCausalLM(config).eval()

    def answer(self, session: str, tokens: list[int]) -> int:
        with torch.inference_mode():
            past, given = Chat.sessions.get(session), torch.tensor([tokens])
            out = self.model(input_ids=given, past_key_values=past, use_cache=True)  # LEAK
        Chat.sessions[session] = out.past_key_values
        return int(out.logits[0, -1].argmax())


chat = Chat()


def predict(session: str, tokens: list[int]) -> int:
    return chat.answer(session, tokens)


def inputs() -> Iterator[tuple[str, list[int]]]:
    return ((f"session-{number}", [(number + part) % 200 for part in range(24)]) for number in count())


EXPECTED = {
    "causes": ["python objects"],
    "holders": ["Chat.sessions"],
    "calls": 600,
    "libraries": ["torch", "transformers"],
}
