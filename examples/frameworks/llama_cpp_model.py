"""llama-cpp-python: a whole program that checks itself. docs/frameworks.md explains it."""

from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
from llama_cpp import Llama

from modelguard import Modified, batched, guard


def write_model(path: str) -> None:
    """Stands for a download: a model that has learnt nothing."""
    draw, words, width, hidden = np.random.default_rng(0), 300, 64, 128
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(256)
    file.add_embedding_length(width)
    file.add_block_count(1)
    file.add_feed_forward_length(hidden)
    file.add_head_count(4)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_tokenizer_model("llama")
    file.add_token_list([f"<0x{n:02X}>" if n < 256 else f"w{n}" for n in range(words)])
    file.add_token_scores([0.0] * words)
    file.add_token_types([gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * (words - 256))
    shapes = {"token_embd": (words, width), "output_norm": (width,)}
    shapes |= {f"blk.0.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (hidden, width), "blk.0.ffn_up": (hidden, width), "blk.0.ffn_down": (width, hidden)}
    for name, shape in shapes.items():
        file.add_tensor(f"{name}.weight", draw.standard_normal(shape, np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


write_model("model.gguf")

llm = guard(
    lambda: Llama("model.gguf", n_ctx=256, n_threads=2, n_threads_batch=2, verbose=False),
    reload_on=Modified("model.gguf"),
    warmup=lambda model: model("hello", max_tokens=1),
    name="llm",
)


@batched(max_size=1, max_queue=16, deadline="30s")
@llm
def complete(model: Llama, prompts: list[str]) -> list[str]:
    return [model(prompt, max_tokens=4)["choices"][0]["text"] for prompt in prompts]


with llm, complete, ThreadPoolExecutor(8) as threads:
    assert all(isinstance(text, str) for text in threads.map(complete, ["two words"] * 16))
    assert llm.status().model_bytes >= 281_088
