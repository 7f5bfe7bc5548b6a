"""The learning method: its environment, its network, its training, and its plans against all plans there are."""

from __future__ import annotations

import heapq
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pytest
from contract import DEVICE, TAPES, plain_peak
from oracle import Machine, ScheduleWriter
from tapes import TOYS, StepBuilder

from vramlab.check import check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.device import DeviceProfile
from vramlab.errors import PlanInfeasible, ScheduleError, Unsupported
from vramlab.liveness import lower_bound_bytes
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Compute, Recompute, Schedule
from vramlab.simulate import simulate
from vramlab.tape import Op, Tape, Variant

METHOD = Library([built_in_collection()]).method("dqn")
CODE = METHOD.load()
ENVIRONMENT = sys.modules[f"{CODE.__package__}.environment"]
ALGORITHMS = sys.modules[f"{CODE.__package__}.algorithms"]
NETWORK = sys.modules[f"{CODE.__package__}.network"]


def step_seconds(tape: Tape, device_bytes: int, **options) -> float:
    """Simulated time of the plan."""
    budget = Budget(device_bytes=device_bytes)
    schedule = METHOD.build(**options).plan(tape, DEVICE, budget)
    return simulate(check_schedule(tape, schedule, budget), DEVICE).metrics.step_seconds


# --- against every plan there is ------------------------------------------------------------------------------------------
class Exhaustive:
    """The fastest step within a budget: Dijkstra's search over all orders of computing, recomputing, copying and dropping maps.

    Knows tape and device only. A state is where each map is, when its copy ends and when each engine is free, all relative to now.
    Only storages of at least `small` bytes move, and those that the step keeps stay.
    """

    def __init__(self, tape: Tape, device: DeviceProfile, budget: int, small: int = 500) -> None:
        self.tape, self.device, self.budget = tape, device, budget
        self.maps = [s.id for s in tape.storages if s.nbytes >= small and not s.at_start and not s.at_end]
        self.last = {s: max([op.id for op in tape.ops if s in tape.reads[op.id]], default=tape.producer[s]) for s in self.maps}
        self.rest = self._bytes_of_the_rest()

    def _bytes_of_the_rest(self) -> list[int]:
        """Per op: what it holds beside the maps while it runs."""
        tape, found = self.tape, []
        last = {s.id: max([op.id for op in tape.ops if s.id in {*tape.reads[op.id], *tape.creates[op.id], *op.mutates}], default=-1)
                for s in tape.storages}
        for op in tape.ops:
            live = [s for s in tape.storages if s.id not in self.maps
                    and (s.at_start or tape.producer[s.id] <= op.id) and (s.at_end or last[s.id] >= op.id)]
            taken = op.takeover and op.takeover[1]
            overlap = tape.storages[taken].nbytes if taken is not None and taken not in self.maps and last[taken] == op.id else 0
            found.append(sum(s.nbytes for s in live) - overlap + op.workspace_bytes)
        return found

    def fastest(self) -> float:
        """Seconds; infinite where the budget cannot be met."""
        start = (0, (("absent", 0.0),) * len(self.maps), 0.0, 0.0)  # next op; residency and copy left; engines left: out, in
        best, queue, count = {start: 0.0}, [(0.0, 0, start)], 0
        while queue:
            clock, _, state = heapq.heappop(queue)
            if clock > best[state]:
                continue
            if state[0] == len(self.tape.ops):
                return clock
            for then, seconds in self.moves(state):
                if clock + seconds < best.get(then, float("inf")):
                    best[then] = clock + seconds
                    count += 1
                    heapq.heappush(queue, (clock + seconds, count, then))
        return float("inf")

    def moves(self, state):
        """Every state that one instruction leads to, and the seconds it takes."""
        op, maps, out, back = state
        for i, (residency, left) in enumerate(maps):
            s, nbytes = self.maps[i], self.tape.storages[self.maps[i]].nbytes
            if residency in ("resident", "both"):
                yield (op, self._with(maps, i, "on_host" if residency == "both" else "absent"), out, back), 0.0
            if residency == "resident" and self.last[s] >= op:
                end = out + self.device.copy_seconds(nbytes, to_host=True)
                yield (op, self._with(maps, i, "offloading", end), end, back), 0.0
            if residency == "on_host" and self._fits(maps, nbytes, op):
                end = back + self.device.copy_seconds(nbytes, to_host=False)
                yield (op, self._with(maps, i, "prefetching", end), out, end), 0.0
            if residency in ("offloading", "prefetching"):
                op_, later, *engines = self._later(state, left)
                yield (op_, self._with(later, i, "both"), *engines), left
            made_by = self.tape.producer[s]
            if residency == "absent" and made_by < op and self.last[s] >= op and (then := self._run(state, made_by, is_first=False)):
                yield then, self.tape.ops[made_by].seconds
        if then := self._run(state, op, is_first=True):
            yield then, self.tape.ops[op].seconds

    def _run(self, state, op: int, is_first: bool):
        """The state after a run of an op, None where an input is away or it does not fit."""
        at, maps, *engines = state
        where = dict(zip(self.maps, maps))
        if any(s in where and where[s][0] not in ("resident", "offloading", "both") for s in self.tape.reads[op]):
            return None
        made = [s for s in self.tape.creates[op] if s in where]
        taken = self.tape.ops[op].takeover and self.tape.ops[op].takeover[1]
        is_over = bool(made) and taken in where and where[taken][0] == "resident" and self.last[taken] <= (op if is_first else at - 1)
        new = sum(self.tape.storages[s].nbytes for s in made) - (self.tape.storages[taken].nbytes if is_over else 0)
        if not self._fits(maps, new, at):
            return None
        for s in made:
            maps = self._with(maps, self.maps.index(s), "resident")
        if is_over:
            maps = self._with(maps, self.maps.index(taken), "absent")
        at, maps, *engines = self._later((at, maps, *engines), self.tape.ops[op].seconds)
        if is_first:
            dead = [self.last[s] <= op and entry[1] == 0.0 for s, entry in zip(self.maps, maps)]
            maps = tuple(("absent", 0.0) if is_dead else entry for is_dead, entry in zip(dead, maps))
        return at + is_first, maps, *engines

    def _later(self, state, seconds: float):
        op, maps, *engines = state
        moved = tuple((residency, max(0.0, round(left - seconds, 9))) for residency, left in maps)
        return op, moved, *(max(0.0, round(left - seconds, 9)) for left in engines)

    def _fits(self, maps, nbytes: int, op: int) -> bool:
        held = sum(self.tape.storages[s].nbytes for s, (residency, _) in zip(self.maps, maps) if residency not in ("absent", "on_host"))
        return held + nbytes + self.rest[min(op, len(self.rest) - 1)] <= self.budget

    @staticmethod
    def _with(maps, i: int, residency: str, left: float = 0.0):
        return (*maps[:i], (residency, left), *maps[i + 1:])


def two_convolutions_and_relu() -> Tape:
    step = StepBuilder()
    return step.finish(step.relu(step.convolution(step.convolution(step.input))))


def squares() -> Tape:
    step = StepBuilder()
    return step.finish(step.matmul_with_itself(step.matmul_with_itself(step.relu(step.convolution(step.input)))))


SMALL = {"chain": TOYS["chain"], "two_convolutions_and_relu": two_convolutions_and_relu, "squares": squares}


@pytest.mark.parametrize("name", SMALL)
def test_small_steps_are_within_5_percent_of_the_fastest_plan(name):
    tape = SMALL[name]()
    assert len(tape.ops) <= 12
    peak, judged = plain_peak(tape), 0
    for share in (1.0, 0.9, 0.8, 0.7, 0.6):
        budget = int(share * peak)
        try:
            seconds = step_seconds(tape, budget)
        except PlanInfeasible:
            continue
        fastest = Exhaustive(tape, DEVICE, budget).fastest()
        assert fastest <= seconds * (1 + 1e-9), "the search is not exhaustive"
        assert seconds <= 1.05 * fastest, f"{seconds} s at {budget} bytes, {fastest} s are possible"
        judged += seconds > sum(op.seconds for op in tape.ops)
    assert judged, "no budget of these presses"


# --- algorithms -----------------------------------------------------------------------------------------------------------
def variants_of(op: Op) -> tuple[Variant, ...]:
    """Of a convolution: the faster, the more bytes it takes inside; and one that is slower and leaner than the library's."""
    if not op.target.startswith("aten.convolution"):
        return ()
    seconds = 0.1 * (op.id % 3)  # so that no two ops have the same to gain
    return (Variant("slow", 1.5 * op.seconds, 0), Variant("quick", (0.7 + seconds) * op.seconds, 400),
            Variant("quickest", (0.3 + seconds) * op.seconds, 1200))


def with_toy_variants(tape: Tape) -> Tape:
    """Each convolution needs 100 bytes inside by the library's own choice."""
    spaces = [100 if op.target.startswith("aten.convolution") else op.workspace_bytes for op in tape.ops]
    return tape.with_costs([op.seconds for op in tape.ops], spaces).with_variants([variants_of(op) for op in tape.ops])


def named(schedule: Schedule, assignment: dict[int, str | None]) -> Schedule:
    """With these algorithms, one an op."""
    def is_named(i) -> bool:
        return isinstance(i, Compute | Recompute) and i.op in assignment

    return replace(schedule, instructions=tuple(replace(i, variant=assignment[i.op]) if is_named(i) else i for i in schedule.instructions))


def peak_by_machine(tape: Tape, schedule: Schedule) -> int:
    """By the symbolic machine, which shares no code with planner, checker and simulator."""
    machine = Machine(tape)
    peak = machine.device_bytes
    for instruction in schedule.instructions:
        machine.step(instruction)
        peak = max(peak, machine.inner_peak)
    machine.finish()
    return peak


def fastest_assignment(tape: Tape, schedule: Schedule, budget: int) -> tuple[float, int]:
    """Every assignment of algorithms to a fixed schedule is tried: seconds of the fastest that fits, and how many do not fit."""
    ops = [op for op in tape.ops if op.variants]
    best, beyond = float("inf"), 0
    for names in product(*([None, *(v.name for v in op.variants)] for op in ops)):
        tried = named(schedule, dict(zip([op.id for op in ops], names)))
        if peak_by_machine(tape, tried) > budget:
            beyond += 1
        else:
            best = min(best, simulate(check_schedule(tape, tried), DEVICE).metrics.step_seconds)
    return best, beyond


def two_convolutions() -> Tape:
    return with_toy_variants(two_convolutions_and_relu())


def test_no_assignment_of_algorithms_to_the_schedule_is_faster():
    tape, seen = two_convolutions(), set()
    for share in (1.0, 0.92, 0.86):
        budget = Budget(device_bytes=int(share * plain_peak(tape)))
        played = METHOD.build(algorithms="library", episodes=1).plan(tape, DEVICE, budget)
        found = ALGORITHMS.with_fastest(check_schedule(tape, played), budget)
        seconds = simulate(found, DEVICE).metrics.step_seconds
        fastest, beyond = fastest_assignment(tape, played, budget.device_bytes)
        assert seconds == pytest.approx(fastest) and peak_by_machine(tape, found.schedule) <= budget.device_bytes
        chosen = {i.op: i.variant for i in found.schedule.instructions if isinstance(i, Compute)}
        assert found.schedule == named(played, chosen), "all runs of an op take the same"
        seen |= {*chosen.values()}
        assert beyond, "everything fits: the budget decides nothing"
        worse = named(found.schedule, {next(op.id for op in tape.ops if op.variants): "slow"})
        assert simulate(check_schedule(tape, worse), DEVICE).metrics.step_seconds > fastest, "the oracle lets a slower one pass"
    assert len(seen) > 2, f"too easy: {seen}"


def test_random_schedules_get_no_faster_assignment_either():
    """Recomputes of convolutions, duplicates and copies as no planner would order them."""
    tape, random, recomputed = two_convolutions(), Random(0), 0
    for _ in range(6):
        writer = ScheduleWriter(tape, random)
        plain = named(Schedule(instructions=writer.write(), tape_digest=tape.digest), {op.id: None for op in tape.ops if op.variants})
        checked = check_schedule(tape, plain)
        budget = Budget(device_bytes=checked.peak_bytes + random.choice([0, 200, 500]))
        found = ALGORITHMS.with_fastest(checked, budget)
        fastest, _ = fastest_assignment(tape, plain, budget.device_bytes)
        assert simulate(found, DEVICE).metrics.step_seconds == pytest.approx(fastest)
        recomputed += sum(isinstance(i, Recompute) and bool(tape.ops[i.op].variants) for i in plain.instructions)
    assert recomputed, "no convolution runs twice in any of them"


def test_a_byte_less_and_the_chosen_algorithms_no_longer_fit():
    tape = two_convolutions()
    budget = Budget(device_bytes=int(0.9 * plain_peak(tape)))
    checked = check_schedule(tape, METHOD.build().plan(tape, DEVICE, budget), budget)
    tight = Budget(device_bytes=checked.peak_bytes - 1)
    with pytest.raises(ScheduleError, match="device-budget"):
        check_schedule(tape, checked.schedule, tight)
    at_peak = checked.schedule.instructions[checked.peak_instruction]
    leaner = ALGORITHMS.with_fastest(check_schedule(tape, named(checked.schedule, {op.id: None for op in tape.ops if op.variants})), tight)
    assert leaner.peak_bytes < checked.peak_bytes and leaner.schedule.instructions[checked.peak_instruction] != at_peak


@pytest.mark.parametrize("toy", ["chain", "long_chain", "residual", "skip"])
def test_choosing_algorithms_never_makes_a_step_slower(toy):
    tape, gained = with_toy_variants(TAPES[toy]()), 0
    for share in (1.0, 0.85, 0.7, 0.6):
        budget = int(share * plain_peak(tape))
        try:
            library = step_seconds(tape, budget, algorithms="library")
        except PlanInfeasible:
            continue
        fastest = step_seconds(tape, budget)
        assert fastest <= library
        gained += fastest < library
    assert gained


def test_the_library_option_names_no_algorithm():
    tape = two_convolutions()
    budget = Budget(device_bytes=int(0.86 * plain_peak(tape)))
    schedule = METHOD.build(algorithms="library").plan(tape, DEVICE, budget)
    assert not any(i.variant for i in schedule.instructions if isinstance(i, Compute | Recompute))
    bare = tape.with_variants([()] * len(tape.ops))
    plans = [METHOD.build(algorithms=name).plan(bare, DEVICE, budget) for name in ("library", "fastest")]
    assert plans[0] == plans[1]


# --- the environment ------------------------------------------------------------------------------------------------------
def environment(toy: str = "long_chain", **options):
    return ENVIRONMENT.MemoryEnvironment(TOYS[toy](), DEVICE, **options)


def play(world, budget: int, seed: int = 0) -> tuple[float, list[int]]:
    """Random decisions; the sum of the rewards and the actions."""
    random, total, actions = np.random.default_rng(seed), 0.0, []
    observation, _ = world.reset(Budget(device_bytes=budget))
    while observation is not None:
        actions.append(int(random.choice(np.flatnonzero(world.action_mask()))))
        observation, reward, *_ = world.step(actions[-1])
        total += reward
    return total, actions


def test_the_rewards_of_a_step_are_the_time_that_it_adds():
    world = environment()
    tape, budget = world.tape, int(0.6 * plain_peak(world.tape))
    for seed in range(5):
        total, actions = play(world, budget, seed)
        assert not world.is_stuck and actions
        metrics = simulate(check_schedule(tape, world.schedule(""), Budget(device_bytes=budget)), DEVICE).metrics
        added = metrics.step_seconds - sum(op.seconds for op in tape.ops)
        unit = ENVIRONMENT.UNIT_SHARE * world.observer.price * world.observer.room
        assert total == pytest.approx(-added / unit)
        assert added == pytest.approx(metrics.stall_seconds + metrics.recompute_seconds)


def test_no_decision_is_due_where_the_budget_does_not_press():
    world = environment()
    observation, info = world.reset(Budget(device_bytes=UNLIMITED))
    assert observation is None and info["decisions"] == 0 and not info["is_stuck"] and not world.action_mask().any()


def test_masked_actions_are_refused_and_masks_follow_the_freedom():
    budget = int(0.6 * plain_peak(TOYS["long_chain"]()))
    for freedom, allowed in ((ENVIRONMENT.Freedom(drops=False), {"SWAP"}), (ENVIRONMENT.Freedom(swaps=False), {"DROP"})):
        world = environment(freedom=freedom)
        observation, _ = world.reset(Budget(device_bytes=budget))
        answers = [observation.answers[a] for a in np.flatnonzero(world.action_mask())]
        assert {answer.move.name for answer in answers} == allowed
        with pytest.raises(ValueError, match="not possible"):
            world.step(int(np.flatnonzero(~world.action_mask())[0]))


def test_a_step_that_cannot_go_on_ends():
    world = environment()
    tape = world.tape
    play(world, int(0.3 * plain_peak(tape)))
    assert world.is_stuck and not world.action_mask().any()


def test_ablations_move_or_recompute_only():
    tape = TOYS["long_chain"]()
    budget = Budget(device_bytes=int(0.8 * plain_peak(tape)))
    for actions, forbidden in (("swap-only", "recompute"), ("recompute-only", "offload")):
        schedule = METHOD.build(actions=actions).plan(tape, DEVICE, budget)
        assert forbidden not in {row[0] for row in schedule.to_json()["instructions"]}


# --- the network and its files --------------------------------------------------------------------------------------------
def test_planning_needs_no_torch():
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from contract import DEVICE, TAPES, plain_peak
from vramlab.collection import Library, built_in_collection
from vramlab.liveness import lower_bound_bytes
from vramlab.planner import Budget
tape = TAPES["residual"]()
Library([built_in_collection()]).method("dqn").build().plan(tape, DEVICE, Budget(device_bytes=int(0.6 * plain_peak(tape))))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parents[1])], check=True)


@pytest.mark.parametrize("agent", ["graph", "mlp"])
def test_agents_that_ship_are_small_and_say_how_they_came_about(agent):
    path = METHOD.folder / f"agent-{agent}.json"
    trained = json.loads(path.read_text())["trained"]
    assert path.stat().st_size < 300_000
    assert trained["command"].endswith(f"--network {agent}") and len(trained["curve"]) > 2 and trained["worlds"]


def test_weights_round_trip_and_other_formats_are_refused(tmp_path):
    network = NETWORK.Network("graph", NETWORK.fresh_weights("graph", 3), {})
    network.save(tmp_path / "a.json")
    again = NETWORK.Network.load(tmp_path / "a.json")
    assert all((again.weights[name] == w).all() for name, w in network.weights.items())
    (tmp_path / "a.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        NETWORK.Network.load(tmp_path / "a.json")


def test_weights_of_another_tape_are_missed_by_name(tmp_path):
    tape = TOYS["long_chain"]()
    with pytest.raises(Unsupported, match="no weights"):
        METHOD.build(weights=str(tmp_path)).plan(tape, DEVICE, Budget(device_bytes=int(0.7 * plain_peak(tape))))


@pytest.mark.parametrize("text", ["root:x:0:0", "[]", '{"format": 1', '{"format": 1, "features": 3}', '{"format": 1, "features": %d}'])
def test_a_file_that_holds_no_weights_is_refused_by_name(tmp_path, text):
    path, tape = tmp_path / "a.json", TOYS["long_chain"]()
    path.write_text(text.replace("%d", str(NETWORK.FEATURES)))
    budget = Budget(device_bytes=int(0.7 * plain_peak(tape)))
    with pytest.raises(Unsupported, match="a.json holds no weights"):
        METHOD.build(weights=str(path)).plan(tape, DEVICE, budget)
    NETWORK.Network("graph", NETWORK.fresh_weights("graph", 3), {}).save(tmp_path / "b.json")
    assert METHOD.build(weights=str(tmp_path / "b.json")).plan(tape, DEVICE, budget).tape_digest == tape.digest


# --- training -------------------------------------------------------------------------------------------------------------
def trainer(folder: Path, **settings):
    training = CODE.training()
    worlds = [training.World("toy", TOYS["long_chain"](), DEVICE)]
    return training.Trainer(worlds, training.Settings(**{"decisions": 400, "evaluate_every": 200, **settings}), folder)


def test_a_training_gets_better_and_repeats_by_its_seed(tmp_path):
    first, second = (trainer(tmp_path / name, kind="mlp") for name in "ab")
    agent, same = first.train(), second.train()
    assert all((agent.weights[name] == same.weights[name]).all() for name in agent.weights)
    untrained = trainer(tmp_path / "c", kind="mlp", decisions=0)
    untrained.train()
    assert first.progress.best_cost < untrained.progress.best_cost and (tmp_path / "a" / "curve.csv").is_file()


def ended(folder: Path) -> dict:
    """What the state of a training says, but for its processor time, which is another each time. Tensors as bytes."""
    import torch

    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.detach().numpy().tobytes()
        if isinstance(value, dict):
            return {name: plain(v) for name, v in value.items() if name not in ("processor_seconds", "seconds")}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    state = plain(torch.load(folder / "training.pt", weights_only=True))
    assert state["progress"]["decisions"] >= state["key"]["settings"]["decisions"], "it has not ended"
    return state


LONG = {"decisions": 900}


def interrupted(folder: Path) -> None:
    """A LONG training, stopped at more than half; the state on disk is of the last evaluation or later."""
    def interrupt(progress):
        if progress.decisions > 500:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(folder, **LONG).train(interrupt)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    """How a LONG training ends that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    trainer(folder, **LONG).train()
    return ended(folder)


def test_an_interrupted_training_ends_as_one_that_was_not(whole, tmp_path):
    interrupted(tmp_path / "cut")
    again = trainer(tmp_path / "cut", **LONG)
    assert 400 <= again.progress.decisions < 900 and again.kept_decisions == again.progress.decisions
    again.train()
    assert ended(tmp_path / "cut") == whole
    curve = (tmp_path / "cut" / "curve.csv").read_text()
    trainer(tmp_path / "cut", **LONG).train()
    assert (tmp_path / "cut" / "curve.csv").read_text() == curve, "a training that has ended learns nothing more"


def test_a_training_that_forgets_its_memory_would_end_otherwise(whole, tmp_path):
    """The control: of the state on disk nothing is idle."""
    interrupted(tmp_path / "cut")
    again = trainer(tmp_path / "cut", **LONG)
    assert again.memories[0].filled
    again.memories[0].filled = again.memories[0].next = 0
    again.train()
    cut = ended(tmp_path / "cut")
    assert cut["key"] == whole["key"] and cut["online"] != whole["online"] and cut["progress"]["curve"] != whole["progress"]["curve"]


def killed_once(command: list[str], folder: Path, rows: int) -> None:
    """Run a training, kill it with SIGKILL once its curve has so many rows, and run it to its end."""
    curve = folder / "curve.csv"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not (curve.is_file() and len(curve.read_text().splitlines()) > rows):
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL, "it had ended before it could be killed"
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_killed_training_ends_as_one_that_was_not(tmp_path):
    code = "import sys; sys.path[:0] = sys.argv[2:]; from test_dqn import LONG, Path, trainer; trainer(Path(sys.argv[1]), **LONG).train()"
    here = Path(__file__).parent
    killed_once([sys.executable, "-c", code, str(tmp_path / "cut"), str(here), str(here.parent)], tmp_path / "cut", rows=2)
    trainer(tmp_path / "whole", **LONG).train()
    assert ended(tmp_path / "cut") == ended(tmp_path / "whole")


@pytest.mark.slow
def test_train_dqn_killed_and_called_again_ends_as_one_that_was_not(tmp_path):
    def command(name: str) -> list[str]:
        words = ["--model", "resnet8-digits", "--batch", "16", "--steps", "3000", "--output", str(tmp_path / name)]
        return [sys.executable, "-m", "vramlab", "train", "dqn", *words]

    killed_once(command("cut"), tmp_path / "cut", rows=2)
    subprocess.run(command("whole"), check=True, stdout=subprocess.DEVNULL)
    assert ended(tmp_path / "cut") == ended(tmp_path / "whole")
    cut, whole = (NETWORK.Network.load(tmp_path / name / "agent.json") for name in ("cut", "whole"))
    assert all((cut.weights[name] == w).all() for name, w in whole.weights.items()) and len(whole.trained["curve"]) >= 3


def test_weights_trained_for_a_step_are_found_whatever_its_algorithms(tmp_path):
    tape = two_convolutions()
    bare = tape.with_variants([()] * len(tape.ops))
    NETWORK.Network("graph", NETWORK.fresh_weights("graph", 3), {}).save(tmp_path / f"{NETWORK.step_digest(bare)}.json")
    budget = Budget(device_bytes=int(0.86 * plain_peak(tape)))
    assert bare.digest != tape.digest and METHOD.build(weights=str(tmp_path)).plan(tape, DEVICE, budget).tape_digest == tape.digest


def test_another_training_neither_goes_on_from_one_nor_overwrites_it(tmp_path):
    trainer(tmp_path, decisions=20).train()
    kept = (tmp_path / "training.pt").read_bytes()
    with pytest.raises(ValueError, match="holds a training of other settings"):
        trainer(tmp_path, decisions=20, seed=1)
    assert (tmp_path / "training.pt").read_bytes() == kept


def test_a_budget_that_nothing_reaches_is_not_learned_on(tmp_path):
    tape = TOYS["long_chain"]()
    least = lower_bound_bytes(tape) / plain_peak(tape)
    with pytest.raises(ValueError, match="out of reach"):
        trainer(tmp_path, decisions=20, shares=(0.9, least - 0.01))
    trainer(tmp_path, decisions=20, shares=(0.9, least + 0.01))
