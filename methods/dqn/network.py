"""The Q-network: how good is each action? One small network scores the rows of an observation one by one.

    tape ─► nodes (storages) ─► ROUNDS of message passing ─► a vector a storage ─┐
    observation ─► one row an action ───────────────────────────────────────────┴─► two hidden layers + a linear path ─► Q

The vectors depend on the tape, the device and the budget, not on the moment, so they are made once an episode. The kind "mlp" does
without them. All expressions are of numpy and of torch alike: planning needs no torch, training differentiates the same code.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Mapping

import numpy as np

from vramlab.device import DeviceProfile
from vramlab.player import StepFacts
from vramlab.tape import Phase, Tape

from .observation import ACTION_COLUMNS, FEATURES, SMALL

KINDS = ("graph", "mlp")
WIDTH = 16  # of a storage's vector
ROUNDS = 2
HIDDEN = 64
NEIGHBOURS = 4  # at most this many on each side take part; the mean is over these
NODE_FEATURES = 10
FORMAT_VERSION = 1
VARIED_SHARE = 0.3  # of the columns, in each variation of the network

Weights = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Graph:
    """A tape as nodes. Arrays of numpy, or tensors of torch of the same shapes. Node i is storage i; `nodes[-1]` stands for none."""

    nodes: Any  # float32 [storages + 1, NODE_FEATURES]
    sources: Any  # int64 [storages + 1, NEIGHBOURS]: what the creating op reads
    source_weights: Any  # float32 [storages + 1, NEIGHBOURS, 1], zero where there is no neighbour
    results: Any  # int64: what the readers create
    result_weights: Any


def tape_graph(tape: Tape, device: DeviceProfile, room_bytes: float) -> Graph:
    """The nodes of a tape; bytes are shares of `room_bytes`, times of the step."""
    facts, count = StepFacts.of(tape), len(tape.storages)
    step_seconds = max(sum(op.seconds for op in tape.ops), 1e-12)
    nodes = np.zeros((count + 1, NODE_FEATURES), np.float32)
    sources, results = [()] * (count + 1), [()] * (count + 1)
    for s in tape.storages:
        made_by, readers = tape.producer[s.id], tape.readers[s.id]
        op = None if made_by is None else tape.ops[made_by]
        needed = facts.needed_at[s.id]
        gaps = np.diff([-1 if made_by is None else made_by, *needed]) if needed else np.zeros(1)
        nodes[s.id] = [
            1.0, s.nbytes / room_bytes, _log(s.nbytes, room_bytes), float(op is None), float(op is not None and op.phase is Phase.FORWARD),
            _log(op.seconds if op else 0.0, step_seconds), _log(device.copy_seconds(s.nbytes, to_host=False), step_seconds),
            len(needed) / 8.0, float(gaps.max()) / facts.end, float(s.at_end),
        ]
        sources[s.id] = () if op is None else tape.reads[made_by][:NEIGHBOURS]
        results[s.id] = tuple(dict.fromkeys(out for r in readers for out in tape.creates[r]))[:NEIGHBOURS]
    return Graph(nodes, *_table(sources), *_table(results))


def step_digest(tape: Tape) -> str:
    """Of a tape without costs: the same step has the same, whatever device and algorithms its costs are of."""
    count = len(tape.ops)
    return tape.with_costs([0.0] * count, [0] * count).with_variants([()] * count).digest


def _log(value: float, unit: float) -> float:
    return float(np.log1p(value / (unit * SMALL))) / 7.0


def _table(lists: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    index, weight = np.zeros((len(lists), NEIGHBOURS), np.int64), np.zeros((len(lists), NEIGHBOURS, 1), np.float32)
    for row, neighbours in enumerate(lists):
        index[row, : len(neighbours)] = neighbours
        weight[row, : len(neighbours)] = 1.0 / max(1, len(neighbours))
    return index, weight


def embed(weights: Weights, graph: Graph) -> Any:
    """float32 [storages + 1, WIDTH]: what the network makes of each storage."""
    h = _relu(graph.nodes @ weights["node.w"] + weights["node.b"])
    for i in range(ROUNDS):
        above = (h[graph.sources] * graph.source_weights).sum(1)
        below = (h[graph.results] * graph.result_weights).sum(1)
        h = _relu(h @ weights[f"round{i}.self"] + above @ weights[f"round{i}.above"] + below @ weights[f"round{i}.below"]
                  + weights[f"round{i}.b"])
    return h


def score(weights: Weights, features: Any, vectors: Any | None) -> Any:
    """[..., actions]: Q of each row. `vectors` [..., actions, WIDTH] are those of the rows' storages, None for "mlp"."""
    x = features @ weights["first.w"] + weights["first.b"]
    if vectors is not None:
        x = x + vectors @ weights["first.v"]
    x = _relu(x)
    x = _relu(x @ weights["second.w"] + weights["second.b"])
    return (x @ weights["last.w"] + features @ weights["skip.w"] + weights["last.b"])[..., 0]


def _relu(x: Any) -> Any:
    return x * (x > 0)


def fresh_weights(kind: str, seed: int) -> dict[str, np.ndarray]:
    """Untrained weights. ValueError for an unknown kind."""
    if kind not in KINDS:
        raise ValueError(f"no network {kind!r}; there are {', '.join(KINDS)}")
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"first.w": (FEATURES, HIDDEN), "first.b": (HIDDEN,), "second.w": (HIDDEN, HIDDEN),
                                          "second.b": (HIDDEN,), "last.w": (HIDDEN, 1), "last.b": (1,), "skip.w": (FEATURES, 1)}
    if kind == "graph":
        shapes |= {"first.v": (WIDTH, HIDDEN), "node.w": (NODE_FEATURES, WIDTH), "node.b": (WIDTH,)}
        for i in range(ROUNDS):
            shapes |= {f"round{i}.{part}": (WIDTH, WIDTH) for part in ("self", "above", "below")} | {f"round{i}.b": (WIDTH,)}
    return {name: np.zeros(shape, np.float32) if name.endswith(".b") or name == "skip.w"
            else (random.standard_normal(shape) * np.sqrt(2.0 / shape[0])).astype(np.float32) for name, shape in sorted(shapes.items())}


@dataclass(frozen=True, eq=False)
class Network:
    """Weights of one kind, and a digest-free file form: JSON with the arrays as base64 of little-endian float32."""

    kind: str
    weights: Weights
    trained: Mapping[str, Any]  # how it came about: command, tapes, figures; empty for an untrained one

    def for_episode(self, tape: Tape, device: DeviceProfile, room_bytes: float) -> Scorer:
        """The network on one tape within one budget."""
        graph = None if self.kind == "mlp" else tape_graph(tape, device, room_bytes)
        return Scorer(self.weights, None if graph is None else embed(self.weights, graph))

    def save(self, path: Path) -> None:
        """Write the file, the same bytes for the same network."""
        arrays = {name: {"shape": list(array.shape), "float32": base64.b64encode(array.astype("<f4").tobytes()).decode()}
                  for name, array in sorted(self.weights.items())}
        body = {"format": FORMAT_VERSION, "kind": self.kind, "features": FEATURES, "trained": dict(self.trained), "weights": arrays}
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Network:
        """Inverse of `save`. ValueError on another format."""
        body = json.loads(path.read_text(encoding="utf-8"))
        if body.get("format") != FORMAT_VERSION or body.get("features") != FEATURES:
            raise ValueError(f"{path}: a network of format {body.get('format')!r} with {body.get('features')!r} features; "
                             f"this version reads {FORMAT_VERSION} with {FEATURES}")
        weights = {name: np.frombuffer(base64.b64decode(array["float32"]), "<f4").reshape(array["shape"])
                   for name, array in body["weights"].items()}
        return cls(kind=body["kind"], weights=weights, trained=body["trained"])


@dataclass(frozen=True, slots=True)
class Scorer:
    """Q of the actions of one episode."""

    weights: Weights
    vectors: Any | None  # of all storages
    tilt: np.ndarray | None = None  # float32 [FEATURES]: added weights of the linear path, in units of Q's spread at a decision

    def q(self, features: np.ndarray, storages: np.ndarray) -> np.ndarray:
        """float32, one entry a row."""
        q = score(self.weights, features, None if self.vectors is None else self.vectors[storages])
        return q if self.tilt is None else q + q.std() * (features @ self.tilt)

    def varied(self, sigma: float, random: np.random.Generator) -> Scorer:
        """Another, with noise on the linear path, on about VARIED_SHARE of the columns that differ from action to action."""
        noise = sigma * random.standard_normal(FEATURES) * (random.random(FEATURES) < VARIED_SHARE) * ACTION_COLUMNS
        return replace(self, tilt=noise.astype(np.float32) + (0 if self.tilt is None else self.tilt))
