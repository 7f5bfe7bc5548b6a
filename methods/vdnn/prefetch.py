"""The prefetch search: which layer's maps come back while another layer's backward runs."""

from __future__ import annotations

from collections.abc import Sequence


def find_prefetch_layer(current: int, kinds: Sequence[str], is_offloaded: Sequence[bool], is_prefetched: list[bool]) -> int | None:
    """The nearest layer before `current` that waits on the host, back to and including the nearest convolution; it is marked as prefetched.

    The question whether it waits comes first: a convolution that waits is itself the answer, another one ends the search.
    """
    for layer in reversed(range(current)):
        if is_offloaded[layer] and not is_prefetched[layer]:
            is_prefetched[layer] = True
            return layer
        if kinds[layer] == "convolution":
            return None
    return None
