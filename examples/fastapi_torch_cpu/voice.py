"""A stand-in for a small text-to-speech model such as VITS: the same kind of layers, random weights, no download."""

import torch


class Voice(torch.nn.Module):
    """Text in, sound out: convolutions over as many positions as the text has bytes."""

    def __init__(self, channels: int = 128) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, channels)
        self.layers = torch.nn.ModuleList(
            torch.nn.Conv1d(channels, channels, kernel, padding=kernel // 2) for kernel in (3, 5, 7, 11) * 2
        )
        self.samples = torch.nn.Conv1d(channels, 8, 1)  # eight samples for each position

    def forward(self, text: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        # Padding is kept at zero between the layers, as VITS does it: it cannot be heard.
        present = torch.ones_like(text) if mask is None else mask
        x = self.embedding(text).transpose(1, 2) * present[:, None]
        for layer in self.layers:
            x = torch.tanh(layer(x)) * present[:, None]
        return self.samples(x).transpose(1, 2).flatten(1)


def load() -> Voice:
    torch.manual_seed(0)
    return Voice().eval()


def encode(text: str) -> torch.Tensor:
    return torch.tensor([list(text.encode())])
