"""A stacked LSTM language model, unrolled over time into plain matrix products: the recurrent network of the sublinear-memory paper."""

from __future__ import annotations

import torch
from torch import nn


class Cell(nn.Module):
    """One step of one layer: input (N, inputs), state (N, hidden) twice -> the new state twice. The weights are nn.LSTM's."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.from_input = nn.Linear(inputs, 4 * hidden)
        self.from_state = nn.Linear(hidden, 4 * hidden)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        admit, forget, value, show = (self.from_input(x) + self.from_state(h)).chunk(4, dim=1)
        c = forget.sigmoid() * c + admit.sigmoid() * value.tanh()
        return show.sigmoid() * c.tanh(), c


class UnrolledLstm(nn.Module):
    """Token ids (N, L) -> logits of the next token (N, L, vocabulary). The first state is zero."""

    def __init__(self, vocabulary: int, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.tokens = nn.Embedding(vocabulary, inputs)
        self.cells = nn.ModuleList(Cell(inputs if layer == 0 else hidden, hidden) for layer in range(layers))
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs = self.tokens(tokens)
        zero = inputs.new_zeros(len(tokens), self.hidden)
        states = [(zero, zero)] * len(self.cells)
        logits = []
        for x in inputs.unbind(1):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, *states[layer])
                x = states[layer][0]
            logits.append(self.head(x))
        return torch.stack(logits, dim=1)


def build(*, vocabulary: int, sequence_length: int, inputs: int, hidden: int, layers: int) -> nn.Module:
    """`sequence_length` is of the batch alone: the same cells serve every step."""
    model = UnrolledLstm(vocabulary, inputs, hidden, layers)
    for weight in model.cells.parameters():
        nn.init.uniform_(weight, -(hidden**-0.5), hidden**-0.5)
    return model
