"""The largest batch, depth or image size that trains on this machine within a cap on memory, by trials that run.

    guess    the simulator's answer for this machine: where the trials begin
    trial    a plan; three whole training steps with the optimizer, under the meter; steps timed, unmetered. Each part in a fresh process
    edge     the largest fits twice, the next fails twice, some values beyond are tried as well (vramlab/finder.py)

A trial fits when every step had a finite loss and gave each parameter its gradient, and no step held more than the cap. A cap in bytes is
held against the meter: what the CPU's allocator, or CUDA's caching allocator, says was held. `auto` on a GPU is the device's own memory.
Trials are kept as they come: a search that is killed goes on from them, except from those that crashed or ran out of time. The part for
GPUs has not run on one yet.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from vramlab.collection import Library
from vramlab.environment import probe
from vramlab.finder import BATCH, Found, Trial, TrialLog, described, find_largest, largest_within, trial, values_of
from vramlab.isolate import CallResult
from vramlab.planner import parse_bytes
from vramlab.record import Outcome, hash_config, write_atomically
from vramlab.run_folder import UNFINISHED

STEPS = 3  # cold; the optimizer's state is there; warm
WARM_UP, TIMED = 2, 5
KEPT = "trials.json"
Ask = Callable[..., CallResult]  # (function of vramlab.measure, spec, *its other arguments) in a fresh process


class MeasuredSearch:
    """One cell's search. `run()` once; then the plan of what was found is in the cell's folder."""

    def __init__(self, ask: Ask, spec: Mapping[str, Any], folder: Path) -> None:
        self._ask, self._spec, self._folder = ask, spec, folder
        self._config, self._search = spec["config"], spec["config"]["search"]
        self._takes_budget = Library(spec["collections"]).method(self._config["method"]).card.takes_budget
        self.cap_bytes = None if self._config["budget"] in (None, "auto") else parse_bytes(self._config["budget"])
        self.log = TrialLog(self._trial, self._kept_trials(), self._keep)
        self.plan_facts: Mapping[str, Any] = {}
        self._library_bytes = 0

    def run(self) -> dict[str, Any]:
        """The block `search` of the record."""
        guess = self._ask("guess_largest", self._spec)
        first = guess.value["largest"] if guess.outcome is Outcome.OK else None
        values = values_of(self._search)
        if self._config["target"].startswith("cuda"):  # what cuBLAS keeps between steps counts in the cap, and no plan knows of it
            self._library_bytes = self._ask("library_bytes", self.spec_at(values[0])).value or 0
        found = find_largest(self.log.fits, values, first=first, doubles=first is None, confirm=self.log.fits_again)
        fast = largest_within(self.log.fits, self.log.is_fast, found, values)
        if found.largest is not None:
            self.plan_facts = self._plan(self.spec_at(found.largest), self._folder).value or {}
        return self._described(found, fast, guess)

    def _described(self, found: Found, fast: int | None, guess: CallResult) -> dict[str, Any]:
        predicted = self.plan_facts.get("predicted") or {}
        return described(
            self._search, found, fast, self.log.trials, memory_bytes=self.cap_bytes or self._memory_bytes(guess), is_simulated=False,
            at_peak=predicted.get("at_peak") or {}, simulated_largest=guess.value["largest"] if guess.outcome is Outcome.OK else None,
            simulated_peak_bytes=predicted.get("peak_bytes"), why_no_guess=guess.message, steps=STEPS,
            cap="device memory" if self.cap_bytes is None else "bytes held against the meter",
        )

    @staticmethod
    def _memory_bytes(guess: CallResult) -> int | None:
        return guess.value["memory_bytes"] if guess.outcome is Outcome.OK else None

    def spec_at(self, value: int) -> dict[str, Any]:
        """The cell at a value of what is searched, as a step within the cap."""
        over = self._search["over"]
        changed = {"batch_size": value} if over == BATCH else {"model_options": {**self._config["model_options"], over: value}}
        budget = self._config["budget"] if self._takes_budget else None
        return {**self._spec, "config": {**self._config, **changed, "kind": "step", "budget": budget}}

    def trial_of(self, value: int) -> Trial:
        """The first trial of a value that was tried."""
        return next(t for t in self.log.trials if t["value"] == value)

    # --- one trial --------------------------------------------------------------------------------------------------------
    def _trial(self, value: int) -> Trial:
        folder = self._folder / "trial"
        folder.mkdir(exist_ok=True)
        try:
            found = self._tried(value, self.spec_at(value), folder)
        finally:
            shutil.rmtree(folder)
        said = f"fits, {found['peak_bytes']:,} bytes" if found["fits"] else f"does not fit: {found['outcome']} {found['reason']}"
        print(f"{self._search['over']} {value}: {said}", flush=True)
        return found

    def _tried(self, value: int, spec: Mapping[str, Any], folder: Path) -> Trial:
        planned = self._plan(spec, folder)
        if planned.outcome is not Outcome.OK:
            is_late = planned.outcome is Outcome.TIMEOUT
            return trial(value, Outcome.PLAN_TIMEOUT if is_late else planned.outcome, planned.reason, message=f"plan: {planned.message}")
        if "infeasible" in planned.value:
            refusal = planned.value["infeasible"]
            return trial(value, Outcome.PLAN_INFEASIBLE, "budget", message=refusal["message"], peak_bytes=refusal["smallest_bytes"])
        ran = self._ask("run_trial", spec, str(folder), STEPS)
        if ran.outcome is not Outcome.OK:
            return trial(value, ran.outcome, ran.reason, message=f"steps: {ran.message}")
        held = {key: n for key, n in ran.value.items() if key != "untrained"}
        outcome, reason, message = self._judged(ran.value)
        if outcome is not Outcome.OK:
            return trial(value, outcome, reason, message=message, peak_bytes=held["peak_bytes"]) | held
        timed = self._ask("time_trial", spec, str(folder), WARM_UP + TIMED)
        if timed.outcome is not Outcome.OK:
            return trial(value, timed.outcome, timed.reason, message=f"timing: {timed.message}", peak_bytes=held["peak_bytes"]) | held
        return trial(value, Outcome.OK, "", samples=spec["config"]["batch_size"], step_seconds=median(timed.value[WARM_UP:]),
                     compute_seconds=planned.value["first_runs_seconds"], seconds_cap=planned.value["seconds_cap"]) | held

    def _plan(self, spec: Mapping[str, Any], folder: Path) -> CallResult:
        return self._ask("plan_trial", spec, str(folder), self._library_bytes)

    def _judged(self, ran: Mapping[str, Any]) -> tuple[Outcome, str, str]:
        """Outcome, reason and one sentence for steps that came to their end."""
        if ran["untrained"]:
            return Outcome.WRONG, "no_training", ran["untrained"]
        over = 0 if self.cap_bytes is None else max(0, ran["peak_bytes"] - self.cap_bytes)
        if not over:
            return Outcome.OK, "", ""
        told = f"the step held {ran['peak_bytes']:,} bytes, {over:,} more than the cap"
        return (Outcome.WRONG, "over_budget", told) if self._takes_budget else (Outcome.OOM, "byte_budget", told)

    # --- trials that outlive a kill ---------------------------------------------------------------------------------------
    @property
    def _key(self) -> str:
        """What a kept trial depends on: the cell, this machine, this torch."""
        environment = probe()
        torch = environment["software"]["packages"].get("torch")
        return hash_config({"config": self._config, "host": environment["system"]["host_hash"], "torch": torch})

    def _kept_trials(self) -> list[Trial]:
        try:
            body = json.loads((self._folder / KEPT).read_text())
        except (OSError, ValueError):
            return []
        return [t for t in body["trials"] if Outcome(t["outcome"]) not in UNFINISHED] if body["key"] == self._key else []

    def _keep(self, trials: list[Trial]) -> None:
        write_atomically(self._folder / KEPT, json.dumps({"key": self._key, "trials": trials}, sort_keys=True) + "\n")
