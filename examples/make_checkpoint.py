"""Write a small language model to stdout with torch.save: bfloat16 weights, head tied to the embedding."""

from __future__ import annotations

import sys

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, *, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, nhead=8, dim_feedforward=4 * width) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight


torch.manual_seed(0)
model = Model(vocabulary=16_000, width=512, layers=2).to(torch.bfloat16)
torch.save(model.state_dict(), sys.stdout.buffer)
