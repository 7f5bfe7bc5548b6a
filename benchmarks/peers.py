"""PyTorch's own memory savers and ours, step time against measured peak, each in turns with plain eager.

    python benchmarks/peers.py [--model resnet50] [--methods hybrid,delta] [--steps 6] [--warmup 2] [--no-inductor]

First the peers: their peak by the allocator's meter in a fresh process, their truth against eager, their step time as a paired ratio to
eager. Then each of our methods is given a peer's *measured* peak as its budget, so that the rows of one block stand at equal memory, and
steps in turns with eager and then with that peer itself: a ratio of two ratios would carry the noise of both. A fused compiler's row shows
what fusion gains too; its share is the ratio at activation_memory_budget 1, where nothing is recomputed. The evidence is written after each
block.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common import keep, specs

from vramlab.isolate import Alternation, Call, alternate, run_isolated
from vramlab.record import Outcome
from vramlab.statistics import Interval, distinguishable, drift, paired_ratio

SIZES = {
    "resnet50": (16, {"image_size": 128}),
    "resnet18": (16, {"image_size": 96}),
    "densenet121": (8, {"image_size": 112}),
    "vit-b-16": (2, {}),
}
PEERS = [
    {"name": "torch-checkpoint", "options": {"policy": "block"}},
    {"name": "torch-checkpoint", "options": {"policy": "selective"}},
    {"name": "torch-compile-budget", "options": {"backend": "aot_eager", "activation_memory_budget": 1.0}},
    {"name": "torch-compile-budget", "options": {"backend": "aot_eager", "activation_memory_budget": 0.5}},
    {"name": "torch-compile-budget", "options": {"backend": "inductor", "activation_memory_budget": 1.0}},
    {"name": "torch-compile-budget", "options": {"backend": "inductor", "activation_memory_budget": 0.5}},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", choices=SIZES)
    parser.add_argument("--methods", default="hybrid,delta")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--evidence", help="name of the file under benchmarks/evidence; peers-MODEL unless given")
    options = parser.parse_args()
    peers = [p for p in PEERS if not (options.no_inductor and p["options"].get("backend") == "inductor")]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        rows = []
        for peer in peers:
            row, step = bench.measure(peer)
            rows.append(row)
            if row["peak_bytes"] and row["peak_ratio"] < 0.995:
                rows += [bench.measure({"name": name}, row["peak_bytes"], step)[0] for name in options.methods.split(",")]
            found = {"model": options.model, "drift": bench.noise.to_json(), "rows": [summary(r) for r in rows]}
            keep(options.evidence or f"peers-{options.model}", rows, found)


class Bench:
    """Contenders on one model."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.places = options, folder, 0
        spec = self._spec({"name": "eager"}, None)
        self.eager_peak = _value(run_isolated(Call(function="vramlab.measure.measure_peak_of", args=(spec, None))))["peak_bytes"]
        step = Call(function="vramlab.measure.timed_step", args=(spec, None))
        control = alternate(step, step, warmup=options.warmup, steps=options.steps)
        self.noise = drift(control.first_seconds, control.second_seconds)

    def measure(self, method: dict, budget_bytes: int | None = None, peer: Call | None = None) -> tuple[dict, Call | None]:
        """One row, and the call that takes its step; in turns with a peer's step too where one is given."""
        spec = self._spec(method, budget_bytes)
        place = str(self.folder / str(self.places))
        row = {"method": method["name"], "options": method.get("options", {}), "budget_bytes": budget_bytes, "outcome": "ok", "message": "",
               "truth": None, "peak_bytes": None, "peak_ratio": None, "time_ratio": None, "is_distinguishable": None, "seconds": None,
               "peer_ratio": None}
        questions = {"make_plan": (place, self.eager_peak), "measure_peak_of": (place,), "gate": (place,)}
        answers = {}
        for what, args in questions.items():
            result = run_isolated(Call(function=f"vramlab.measure.{what}", args=(spec, *args)), timeout_seconds=600)
            refusal = (result.value or {}).get("infeasible") if result.outcome is Outcome.OK else {"message": result.message}
            if refusal:
                outcome = result.outcome if result.outcome is not Outcome.OK else Outcome.PLAN_INFEASIBLE
                return self._said(row | {"outcome": str(outcome), "message": refusal["message"].splitlines()[0]}), None
            answers[what] = result.value
        peak = answers["measure_peak_of"]["peak_bytes"]
        step, eager = (Call(function="vramlab.measure.timed_step", args=(spec, where)) for where in (place, None))
        turns = self._turns(step, eager)
        ratio = paired_ratio(turns.first_seconds, turns.second_seconds)
        row |= {"truth": answers["gate"]["truth"], "peak_bytes": peak, "peak_ratio": peak / self.eager_peak, "time_ratio": ratio.to_json(),
                "is_distinguishable": distinguishable(ratio, self.noise), "seconds": turns.first_seconds,
                "eager_seconds": turns.second_seconds}
        if peer is not None:
            turns = self._turns(step, peer)
            row["peer_ratio"] = paired_ratio(turns.first_seconds, turns.second_seconds).to_json()
            row |= {"seconds_beside_peer": turns.first_seconds, "peer_seconds": turns.second_seconds}
        return self._said(row), step

    def _turns(self, first: Call, second: Call) -> Alternation:
        return alternate(first, second, warmup=self.options.warmup, steps=self.options.steps)

    def _spec(self, method: dict, budget_bytes: int | None) -> dict:
        batch, model_options = SIZES[self.options.model]
        self.places += 1
        (self.folder / str(self.places)).mkdir()
        budgets = {} if budget_bytes is None else {"budgets": [budget_bytes]}
        (spec,) = specs({"model": {"name": self.options.model, **model_options}, "methods": [method], "targets": ["cpu"],
                         "batch_sizes": [batch], "measure": {"gate_batch_size": 4}, **budgets}, self.folder)
        return spec

    def _said(self, row: dict) -> dict:
        print(summary(row), flush=True)
        return row


def summary(row: dict) -> str:
    """`0.62 x eager's peak, 1.210 [1.180, 1.250] x its time: torch-checkpoint policy=block, exact`"""
    name = " ".join([row["method"], *(f"{k}={v}" for k, v in row["options"].items())])
    at = f" at {row['budget_bytes']:,} bytes" if row["budget_bytes"] else ""
    if row["time_ratio"] is None:
        return f"{name}{at}: {row['outcome']}: {row['message']}"
    beside = f", {Interval(**row['peer_ratio'])} x the peer's" if row.get("peer_ratio") else ""
    return f"{row['peak_ratio']:.3f} x eager's peak, {Interval(**row['time_ratio'])} x its time{beside}: {name}{at}, {row['truth']}"


def _value(result):
    if result.outcome is not Outcome.OK:
        raise SystemExit(f"{result.outcome}: {result.message}\n{result.traceback}")
    return result.value


if __name__ == "__main__":
    main()
