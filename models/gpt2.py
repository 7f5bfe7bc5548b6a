"""GPT-2: a decoder of pre-norm blocks with causal attention; its head is tied to the token embedding."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

POSITIONS = 1024  # rows of the position table, whatever the sequence length in use


class CausalAttention(nn.Module):
    """Multi-head attention to the past and the present: (N, L, hidden) -> (N, L, hidden)."""

    def __init__(self, hidden: int, heads: int, length: int, dropout: float, attention: str) -> None:
        super().__init__()
        self.heads, self.is_fused = heads, attention == "sdpa"
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        if not self.is_fused:
            future = torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)
            self.register_buffer("future", future, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if self.is_fused:
            rate = self.dropout.p if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        else:
            length = x.shape[1]
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(self.future[:length, :length], -math.inf)
            mixed = self.dropout(scores.softmax(dim=-1)) @ v
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and feed-forward, each behind a LayerNorm and on a residual stream."""

    def __init__(self, hidden: int, heads: int, length: int, dropout: float, attention: str) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = CausalAttention(hidden, heads, length, dropout, attention)
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.expand = nn.Linear(hidden, 4 * hidden)
        self.activation = nn.GELU(approximate="tanh")
        self.output = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.output(self.activation(self.expand(self.feed_forward_norm(x)))))


class Gpt2(nn.Module):
    """Token ids (N, L) -> logits of the next token (N, L, vocabulary)."""

    def __init__(self, vocabulary: int, length: int, layers: int, hidden: int, heads: int, dropout: float, attention: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(POSITIONS, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, length, dropout, attention) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)
        for name, weight in self.named_parameters():
            if name.endswith("output.weight"):  # what writes into the residual stream
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.tokens(tokens) + self.positions.weight[:tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    """Normal with deviation 0.02; biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build(*, vocabulary: int, sequence_length: int, layers: int, hidden: int, heads: int, dropout: float, attention: str) -> nn.Module:
    """ValueError when the heads do not divide the width or the position table is too short."""
    if hidden % heads:
        raise ValueError(f"hidden {hidden} is no multiple of heads {heads}")
    if sequence_length > POSITIONS:
        raise ValueError(f"sequence_length {sequence_length} is above the {POSITIONS} positions that the model has")
    return Gpt2(vocabulary, sequence_length, layers, hidden, heads, dropout, attention)
