"""Double DQN with replay (van Hasselt, Guez, Silver, AAAI 2016) over many tapes, devices and budgets at once.

A round is one budget, drawn anew. The agent plays it, and in `guided_share` of the rounds so do `guides` whose preferences are a random
mix of the estimates in the observation. Of these plays the fastest is a demonstration: beside the temporal-difference loss its actions
have to score above all others by a margin (Hester et al., Deep Q-learning from Demonstrations, AAAI 2018), be it the agent's own or a
guide's. Returns over `n_steps` decisions are bootstrapped with the target network's value of the action that the online network
prefers. After each round as many updates follow as it had decisions, over `decisions_per_update`. All that is random comes from one
seed. Between two rounds the state of the training is written now and then, replay memory included: one that was killed goes on from
there, and ends with the weights of one that was not.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vramlab.device import DeviceProfile
from vramlab.liveness import lower_bound_bytes
from vramlab.planner import Budget
from vramlab.record import write_atomically
from vramlab.tape import Tape

from .environment import Freedom, MemoryEnvironment
from .network import Graph, Network, embed, fresh_weights, score, tape_graph
from .observation import A_BYTE, ACTIONS, AROUND_NEED, AROUND_STALE, CLOSURE, COST, DEPENDENTS, FEATURES, NEED, STALE, Observation
from .play import Move

# So many of the guides that won last in a world are what new ones there are varied from.
GUIDES_KEPT = 6
MEMORY_COLUMNS = ("mask", "storages", "action", "value", "then", "is_shown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of one training. The defaults are those of the agent that ships."""

    decisions: int = 8_000  # how many are learned from in all; the end of the training
    kind: str = "graph"
    seed: int = 0
    discount: float = 0.5
    n_steps: int = 1
    batch: int = 64
    replay: int = 24_000  # decisions remembered, over all worlds
    learning_rate: float = 1e-3  # falls linearly to a tenth
    epsilon_start: float = 0.3
    epsilon_end: float = 0.02
    epsilon_share: float = 0.3  # of the decisions, over which epsilon falls
    guided_share: float = 1.0
    guides: int = 6
    margin: float = 1.0
    margin_weight: float = 2.0
    decisions_per_update: int = 4
    target_updates: int = 250  # updates between two copies into the target network
    shares: tuple[float, ...] = ()  # of eager's peak; empty: drawn between what is reachable and 0.95
    is_swap_only: bool = False
    is_recompute_only: bool = False
    evaluate_every: int = 1_000  # decisions


@dataclass(frozen=True, slots=True)
class World:
    """Where episodes are played: a tape with op times, and the device that they are of."""

    name: str
    tape: Tape
    device: DeviceProfile


@dataclass
class Progress:
    """What has been done so far; goes to disk with the weights."""

    decisions: int = 0
    episodes: int = 0
    updates: int = 0
    seconds: float = 0.0  # of processor time
    curve: list[dict[str, float]] = field(default_factory=list)  # one row an evaluation
    best_cost: float = float("inf")


Episode = list[tuple[Observation, int, float]]  # what was seen, what was done, the reward


@dataclass(frozen=True, slots=True, eq=False)
class Guide:
    """Fetches when it can, and else takes the least of a mix of columns of the observation; how they are mixed is random.

    `costs`: shares of an action's cost over its worth, over its bytes, over bytes and staleness, and over bytes and time until needed.
    """

    costs: np.ndarray  # float64 [4]
    others: np.ndarray  # float64 [4]: what closure, need, dependents and staleness count

    @classmethod
    def fresh(cls, random: np.random.Generator) -> Guide:
        """One of any preferences."""
        costs = random.dirichlet(np.full(4, 0.5))
        return cls(costs, random.uniform(0, [1.0, 0.3, 0.3, 0.5]) * [1, 1, random.random() < 0.5, random.random() < 0.5])

    @classmethod
    def like(cls, parent: Guide, random: np.random.Generator) -> Guide:
        """One whose preferences are near to those of another."""
        costs = parent.costs * np.exp(0.4 * random.standard_normal(4)) + 0.02 * random.random(4)
        return cls(costs / costs.sum(), parent.others * np.exp(0.4 * random.standard_normal(4)))

    def act(self, observation: Observation) -> int:
        """One of the possible actions."""
        possible = np.flatnonzero(observation.mask)
        if observation.mask[0]:
            return int(possible[1])
        rows, (closure, need, dependents, stale) = observation.features[possible], self.others
        cost = np.where(rows[:, Move.SWAP] > 0, rows[:, COST], rows[:, COST] + closure * (rows[:, CLOSURE] - rows[:, COST]))
        mixed = np.column_stack([cost / 2, rows[:, A_BYTE], rows[:, AROUND_STALE], rows[:, AROUND_NEED]]) @ self.costs
        mixed += dependents * rows[:, DEPENDENTS] - need * rows[:, NEED] - stale * rows[:, STALE]
        return int(possible[int(mixed.argmin())])


class Memory:
    """Decisions of one world with their returns, the oldest overwritten first."""

    def __init__(self, size: int) -> None:
        self.features = np.zeros((size, ACTIONS, FEATURES), np.float32)
        self.mask = np.zeros((size, ACTIONS), np.bool_)
        self.storages = np.full((size, ACTIONS), -1, np.int64)
        self.action = np.zeros(size, np.int64)
        self.value = np.zeros(size, np.float32)  # discounted rewards of the next n decisions
        self.then = np.full(size, -1, np.int64)  # the decision after those, -1 where the episode ended
        self.is_shown = np.zeros(size, np.bool_)  # part of a demonstration
        self.size, self.next, self.filled = size, 0, 0

    def add(self, episode: Episode, n_steps: int, discount: float, *, is_shown: bool) -> None:
        """One episode, at most what fits."""
        episode = episode[-(self.size - 1):]
        if self.next + len(episode) > self.size:  # an episode is never split; what lies behind is given up
            self.filled, self.next = max(self.next, 0), 0
        first = self.next
        rewards = np.array([reward for _, _, reward in episode])
        powers = discount ** np.arange(n_steps)
        for i, (observation, action, _) in enumerate(episode):
            at, ahead = first + i, rewards[i: i + n_steps]
            self.features[at], self.mask[at], self.storages[at] = observation.features, observation.mask, observation.storages
            self.action[at], self.value[at], self.is_shown[at] = action, float(ahead @ powers[: len(ahead)]), is_shown
            self.then[at] = at + n_steps if i + n_steps < len(episode) else -1
        self.next = first + len(episode)
        self.filled = max(self.filled, self.next)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """All that is remembered; of the features only the rows of possible actions, the others are zero."""
        columns = {name: getattr(self, name)[: self.filled] for name in MEMORY_COLUMNS}
        return columns | {"rows": self.features[: self.filled][self.mask[: self.filled]], "next": np.array([self.next])}

    def fill(self, arrays: dict[str, np.ndarray]) -> None:
        """Inverse of `to_arrays`, of a memory in which nothing is yet."""
        self.filled, self.next = len(arrays["mask"]), int(arrays["next"][0])
        for name in MEMORY_COLUMNS:
            getattr(self, name)[: self.filled] = arrays[name]
        self.features[: self.filled][self.mask[: self.filled]] = arrays["rows"]

    def draw(self, count: int, random: np.random.Generator) -> np.ndarray:
        """Of what is remembered: half from all, half from the demonstrations, where there are any."""
        shown = np.flatnonzero(self.is_shown[: self.filled])
        at = random.integers(self.filled, size=count)
        if len(shown):
            at[count // 2:] = random.choice(shown, count - count // 2)
        return at


class Trainer:
    """Trains one agent. `folder` keeps the state; a state of the same settings and worlds that lies there is gone on from.

    ValueError where the state there is another training's, and where no world can be played within a budget to learn on.
    """

    def __init__(self, worlds: Sequence[World], settings: Settings, folder: Path) -> None:
        import torch

        self.torch, self.settings, self.folder, self.worlds = torch, settings, folder, list(worlds)
        freedom = Freedom(swaps=not settings.is_recompute_only, drops=not settings.is_swap_only)
        self.environments = [MemoryEnvironment(w.tape, w.device, freedom, is_shaped=True) for w in worlds]
        self.peaks = [environment.peak_bytes for environment in self.environments]
        self.lowest = [lower_bound_bytes(w.tape) / peak for w, peak in zip(worlds, self.peaks)]
        for share in settings.shares:
            if share < min(self.lowest):
                raise ValueError(f"a budget of {share:.0%} of eager's peak is out of reach: no schedule holds less than "
                                 f"{min(self.lowest):.1%}")
        self.memories = [Memory(max(2_000, settings.replay // len(self.worlds))) for _ in self.worlds]
        self.graphs = [self._graph(w, peak) for w, peak in zip(worlds, self.peaks)]
        self.winners: list[list[Guide]] = [[] for _ in self.worlds]
        self.progress = Progress()
        self.random = np.random.default_rng(settings.seed)
        self._set_weights(fresh_weights(settings.kind, settings.seed))
        self.best = self.weights_as_arrays()
        self.kept_decisions = 0  # of the state on disk
        self._resume()

    # --- the loop ----------------------------------------------------------------------------------------------------------
    def train(self, on_progress: Callable[[Progress], None] = lambda progress: None, *, until_seconds: float = float("inf"),
              save_every_seconds: float = 20.0) -> Network:
        """To the end of the decisions, or until so many seconds of wall clock have gone. Returns the best network so far.

        The state is written after each evaluation, and else every so many seconds, always between two rounds: what a round that is
        interrupted has done is lost, and is done again in the same way.
        """
        started, saved, used = time.monotonic(), time.monotonic(), time.process_time()
        while self.progress.decisions < self.settings.decisions and time.monotonic() - started < until_seconds:
            self._round()
            self.progress.seconds, used = self.progress.seconds + time.process_time() - used, time.process_time()
            is_due = self.progress.decisions >= len(self.progress.curve) * self.settings.evaluate_every
            if is_due:
                self._evaluate()
            if is_due or time.monotonic() - saved > save_every_seconds:
                self.save()
                saved = time.monotonic()
            on_progress(self.progress)
        if not self.progress.curve or self.progress.curve[-1]["decisions"] < self.progress.decisions:
            self._evaluate()
        self.save()
        return self.network()

    @property
    def epsilon(self) -> float:
        """Share of random decisions now."""
        s = self.settings
        done = min(1.0, self.progress.decisions / max(1.0, s.epsilon_share * s.decisions))
        return s.epsilon_start + (s.epsilon_end - s.epsilon_start) * done

    def network(self) -> Network:
        """The best so far, with how it came about."""
        told = {"settings": asdict(self.settings), "worlds": [[w.name, w.device.name, w.tape.digest] for w in self.worlds],
                "decisions": self.progress.decisions, "episodes": self.progress.episodes,
                "processor_seconds": round(self.progress.seconds, 1),
                "added_percent": round(self.progress.best_cost, 3), "curve": list(self.progress.curve)}
        return Network(self.settings.kind, self.best, told)

    def _round(self) -> None:
        s, world = self.settings, int(self.random.integers(len(self.worlds)))
        budget = Budget(device_bytes=int(self._share(world) * self.peaks[world]))
        arrays, vectors, epsilon = self.arrays, self._vectors(world), self.epsilon

        def act(observation: Observation) -> int:
            if self.random.random() < epsilon:
                return int(self.random.choice(np.flatnonzero(observation.mask)))
            return best_action(arrays, observation, vectors)

        guides = self._draw_guides(world) if self.random.random() < s.guided_share else []
        plays = [self._play(world, budget, player) for player in [act, *(guide.act for guide in guides)]]
        best = min(range(len(plays)), key=lambda i: plays[i][0])
        if best:
            self.winners[world] = [guides[best - 1], *self.winners[world]][:GUIDES_KEPT]
        for i, (seconds, episode) in enumerate(plays):
            if episode:
                is_shown = i == best and len(plays) > 1 and seconds < float("inf")
                self.memories[world].add(episode, s.n_steps, s.discount, is_shown=is_shown)
        self.progress.episodes += len(plays)
        decisions = sum(max(1, len(episode)) for _, episode in plays)
        self.progress.decisions += decisions
        if any(memory.filled for memory in self.memories):
            for _ in range(decisions // s.decisions_per_update):
                self._update()

    def _draw_guides(self, world: int) -> list[Guide]:
        """Every other one resembles one that lately won in this world, where there is one."""
        parents, random = [None, *self.winners[world]], self.random
        drawn = [parents[int(random.integers(len(parents)))] if i % 2 else None for i in range(self.settings.guides)]
        return [Guide.fresh(random) if parent is None else Guide.like(parent, random) for parent in drawn]

    def _play(self, world: int, budget: Budget, act: Callable[[Observation], int]) -> tuple[float, Episode]:
        """(seconds added, infinite where the step got stuck; the decisions)."""
        environment, episode = self.environments[world], []
        observation, info = environment.reset(budget)
        while observation is not None:
            before, action = observation, act(observation)
            observation, reward, _, _, info = environment.step(action)
            episode.append((before, action, reward))
        return float("inf") if info["is_stuck"] else info["added_seconds"], episode

    def _share(self, world: int) -> float:
        if self.settings.shares:
            return float(self.random.choice(self.settings.shares))
        return float(self.random.uniform(min(0.9, max(0.22, 1.03 * self.lowest[world])), 0.95))

    def _vectors(self, world: int) -> np.ndarray | None:
        return None if self.settings.kind == "mlp" else embed(self.arrays, self.graphs[world][0])

    def _graph(self, world: World, peak: int) -> tuple[Graph, Graph]:
        """As arrays, and as tensors. Bytes are shares of eager's peak here, whatever the budget."""
        graph = tape_graph(world.tape, world.device, peak)
        return graph, Graph(*(self.torch.from_numpy(getattr(graph, name)) for name in Graph.__dataclass_fields__))

    # --- learning ----------------------------------------------------------------------------------------------------------
    def _update(self) -> None:
        torch, s = self.torch, self.settings
        filled = np.array([memory.filled for memory in self.memories], np.float64)
        world = int(self.random.choice(len(filled), p=filled / filled.sum()))
        memory = self.memories[world]
        at = memory.draw(s.batch, self.random)
        then = memory.then[at]
        online = self._vectors_of(self.online, world)
        with torch.no_grad():
            if world not in self.target_vectors:
                self.target_vectors[world] = self._vectors_of(self.target, world)
            goes_on, next_at = torch.from_numpy(then >= 0), np.maximum(then, 0)
            possible = torch.from_numpy(memory.mask[next_at])
            preferred = self._q(self.online, online, memory, next_at).masked_fill(~possible, -torch.inf).argmax(1, keepdim=True)
            value = self._q(self.target, self.target_vectors[world], memory, next_at).gather(1, preferred)[:, 0]
            goal = torch.from_numpy(memory.value[at]) + torch.where(goes_on, s.discount**s.n_steps * value, torch.zeros(()))
        action = torch.from_numpy(memory.action[at])[:, None]
        q = self._q(self.online, online, memory, at)
        taken = q.gather(1, action)[:, 0]
        loss = torch.nn.functional.smooth_l1_loss(taken, goal)
        shown = torch.from_numpy(memory.is_shown[at])
        if shown.any():
            rivals = (q + s.margin).scatter(1, action, taken[:, None]).masked_fill(~torch.from_numpy(memory.mask[at]), -torch.inf)
            loss = loss + s.margin_weight * ((rivals.max(1).values - taken) * shown).sum() / shown.sum()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.online.values()), 10.0)
        for group in self.optimizer.param_groups:
            group["lr"] = s.learning_rate * (1.0 - 0.9 * min(1.0, self.progress.decisions / s.decisions))
        self.optimizer.step()
        self.progress.updates += 1
        if self.progress.updates % s.target_updates == 0:
            self.target = {name: w.detach().clone() for name, w in self.online.items()}
            self.target_vectors.clear()

    def _vectors_of(self, weights: dict[str, Any], world: int) -> Any:
        return None if self.settings.kind == "mlp" else embed(weights, self.graphs[world][1])

    def _q(self, weights: dict[str, Any], vectors: Any, memory: Memory, at: np.ndarray) -> Any:
        """[batch, actions]."""
        of_rows = None if vectors is None else vectors[self.torch.from_numpy(memory.storages[at])]
        return score(weights, self.torch.from_numpy(memory.features[at]), of_rows)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The online weights, sharing memory with torch."""
        return {name: w.detach().numpy() for name, w in self.online.items()}

    def weights_as_arrays(self) -> dict[str, np.ndarray]:
        """A copy of the online weights."""
        return {name: array.copy() for name, array in self.arrays.items()}

    def _set_weights(self, weights: dict[str, np.ndarray]) -> None:
        torch = self.torch
        self.online = {name: torch.from_numpy(np.array(w)).requires_grad_() for name, w in weights.items()}
        self.target = {name: w.detach().clone() for name, w in self.online.items()}
        self.target_vectors: dict[int, Any] = {}  # per world, as long as the target stays
        self.optimizer = torch.optim.Adam(list(self.online.values()), lr=self.settings.learning_rate)

    # --- how good it is ----------------------------------------------------------------------------------------------------
    def _evaluate(self) -> None:
        """Mean over all worlds at fixed shares, without random decisions: time added, in percent of a step; a stuck step counts 200."""
        costs, stuck = [], 0
        for world, environment in enumerate(self.environments):
            plain = MemoryEnvironment(environment.tape, environment.device, environment.freedom)
            for share in evaluation_shares(self.lowest[world]):
                added, is_stuck = play_greedily(plain, int(share * self.peaks[world]), self.arrays, self._vectors(world))
                stuck += is_stuck
                costs.append(200.0 if is_stuck else 100.0 * added / plain.observer.step_seconds)
        cost = float(np.mean(costs))
        row = {"decisions": self.progress.decisions, "episodes": self.progress.episodes,
               "processor_seconds": round(self.progress.seconds, 1),
               "epsilon": round(self.epsilon, 4), "added_percent": round(cost, 4), "stuck": stuck}
        self.progress.curve.append(row)
        if cost <= self.progress.best_cost:
            self.progress.best_cost, self.best = cost, self.weights_as_arrays()

    # --- on disk -----------------------------------------------------------------------------------------------------------
    def _key(self) -> dict[str, Any]:
        worlds = [[w.tape.digest, asdict(w.device)] for w in self.worlds]
        return json.loads(json.dumps({"settings": asdict(self.settings), "worlds": worlds}, default=str))

    def save(self) -> None:
        """All that the next round depends on, in one file that is replaced whole; the curve beside it as CSV.

        A training that has ended leaves out its memories: nothing will be learned from them.
        """
        has_ended = self.progress.decisions >= self.settings.decisions
        memories = [] if has_ended else [self._tensors(memory.to_arrays()) for memory in self.memories]
        self.folder.mkdir(parents=True, exist_ok=True)
        body = {"key": self._key(), "online": self.online, "target": self.target, "optimizer": self.optimizer.state_dict(),
                "best": self._tensors(self.best), "progress": asdict(self.progress),
                "random": json.dumps(self.random.bit_generator.state), "memories": memories,
                "winners": [[self._tensors(asdict(guide)) for guide in guides] for guides in self.winners]}
        part = self.folder / ".training.pt.part"
        self.torch.save(body, part)
        part.replace(self.folder / "training.pt")
        write_atomically(self.folder / "curve.csv", curve_csv(self.progress.curve))
        self.kept_decisions = self.progress.decisions

    def _tensors(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return {name: self.torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def _resume(self) -> None:
        path = self.folder / "training.pt"
        if not path.is_file():
            return
        body = self.torch.load(path, weights_only=True)
        if body["key"] != self._key():
            raise ValueError(f"{self.folder} holds a training of other settings, tapes or device rates; name another folder or remove it")
        self._set_weights({name: w.detach().numpy() for name, w in body["online"].items()})
        self.target = body["target"]
        self.optimizer.load_state_dict(body["optimizer"])
        self.best = {name: w.numpy() for name, w in body["best"].items()}
        for memory, tensors in zip(self.memories, body["memories"]):
            memory.fill({name: tensor.numpy() for name, tensor in tensors.items()})
        self.winners = [[Guide(guide["costs"].numpy(), guide["others"].numpy()) for guide in guides] for guides in body["winners"]]
        self.progress = Progress(**body["progress"])
        self.kept_decisions = self.progress.decisions
        self.random.bit_generator.state = json.loads(body["random"])


def evaluation_shares(lowest: float) -> tuple[float, ...]:
    """Of eager's peak: three budgets that can be reached."""
    low = min(0.9, max(0.3, 1.1 * lowest))
    return low, (low + 0.9) / 2, 0.9


def best_action(weights: dict[str, np.ndarray], observation: Observation, vectors: np.ndarray | None) -> int:
    """The greedy action."""
    possible = np.flatnonzero(observation.mask)
    q = score(weights, observation.features[possible], None if vectors is None else vectors[observation.storages[possible]])
    return int(possible[int(q.argmax())])


def play_greedily(environment: MemoryEnvironment, device_bytes: int, weights: dict[str, np.ndarray],
                  vectors: np.ndarray | None) -> tuple[float, bool]:
    """One episode without random decisions: (seconds added, is it stuck)."""
    observation, info = environment.reset(Budget(device_bytes=device_bytes))
    while observation is not None:
        observation, _, _, _, info = environment.step(best_action(weights, observation, vectors))
    return info["added_seconds"], info["is_stuck"]


def curve_csv(curve: Sequence[dict[str, float]]) -> str:
    """The learning curve, one row an evaluation."""
    if not curve:
        return ""
    return "\n".join([",".join(curve[0]), *(",".join(str(value) for value in row.values()) for row in curve)]) + "\n"


def curve_svg(curve: Sequence[dict[str, float]]) -> str:
    """The learning curve as a picture: time added in percent of a step, over decisions."""
    width, height, left, bottom = 640, 320, 60, 40
    most_x, most_y = max(row["decisions"] for row in curve) or 1, max(row["added_percent"] for row in curve) or 1.0
    across, up = (width - left - 20) / most_x, (height - bottom - 20) / most_y
    points = [(left + across * row["decisions"], height - bottom - up * row["added_percent"]) for row in curve]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    text = 'font-family="sans-serif" font-size="12"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{left},20 V{height - bottom} H{width - 20}" fill="none" stroke="black"/>',
        f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="2"/>',
        f'<text x="{left}" y="14" {text}>simulated time added without random decisions, % of a step (top {most_y:.1f})</text>',
        f'<text x="{left}" y="{height - 12}" {text}>decisions learned from, to {most_x:,.0f}</text>', "</svg>", ""])


def name_of(settings: Settings) -> str:
    """A short name for a folder: equal settings have equal names."""
    return hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()[:8]
