"""BERT encoder with its masked-language-model head, tied to the token embedding.

Sequences are full: there is no padding, so there is no attention mask. The pooler and the next-sentence head are left out.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

POSITIONS = 512  # rows of the position table, whatever the sequence length in use
SEGMENTS = 2


class SelfAttention(nn.Module):
    """Bidirectional multi-head attention: (N, L, hidden) -> (N, L, hidden)."""

    def __init__(self, hidden: int, heads: int, dropout: float, attention: str) -> None:
        super().__init__()
        self.heads, self.is_fused = heads, attention == "sdpa"
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.output = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        if self.is_fused:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.p if self.training else 0.0)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            mixed = self.dropout(scores.softmax(dim=-1)) @ v
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and feed-forward, each with dropout, a residual and a LayerNorm after it."""

    def __init__(self, hidden: int, heads: int, dropout: float, attention: str) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden, heads, dropout, attention)
        self.attention_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.feed_forward = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.feed_forward_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class Bert(nn.Module):
    """Token ids (N, L) and segment ids (N, L) -> logits over the vocabulary (N, L, vocabulary)."""

    def __init__(self, vocabulary: int, layers: int, hidden: int, heads: int, dropout: float, attention: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(POSITIONS, hidden)
        self.segments = nn.Embedding(SEGMENTS, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout, attention) for _ in range(layers))
        self.transform = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden, eps=1e-12))
        self.head = nn.Linear(hidden, vocabulary)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[:tokens.shape[1]] + self.segments(segments)
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.transform(x))


def _initialise(module: nn.Module) -> None:
    """Truncated normal with deviation 0.02, cut at two deviations; biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def build(*, vocabulary: int, sequence_length: int, layers: int, hidden: int, heads: int, dropout: float, attention: str) -> nn.Module:
    """ValueError when the heads do not divide the width or the position table is too short."""
    if hidden % heads:
        raise ValueError(f"hidden {hidden} is no multiple of heads {heads}")
    if sequence_length > POSITIONS:
        raise ValueError(f"sequence_length {sequence_length} is above the {POSITIONS} positions that the model has")
    return Bert(vocabulary, layers, hidden, heads, dropout, attention).apply(_initialise)
