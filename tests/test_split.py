"""Convolution backwards in two ops: the same storages, eager's bits, and kernels asked whether a split changes any."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from steps import cross_entropy, differences
from torch import nn

from vramlab import prepared
from vramlab.capture import Captured, capture
from vramlab.check import check_schedule
from vramlab.costs import measure_costs
from vramlab.errors import ScheduleError
from vramlab.execute import Executor
from vramlab.flops import with_flops
from vramlab.isolate import CallResult
from vramlab.liveness import replay_schedule
from vramlab.prepared import Question, are_exact, ask, prepare_tape, question_of
from vramlab.record import Outcome
from vramlab.schedule import Compute, Free
from vramlab.split import NEED, RELU_BACKWARD, split_convolutions, split_like, splittable_ops
from vramlab.tape import Tape

CPU = torch.device("cpu")


def make_model(channels_last: bool = False) -> nn.Module:
    """Plain, strided, grouped, pointwise and transposed convolutions; the first one's input wants no gradient."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=4, bias=False), nn.ReLU(),
                          nn.Conv2d(8, 16, 1, stride=2), nn.Tanh(), nn.ConvTranspose2d(16, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))
    return model.to(memory_format=torch.channels_last) if channels_last else model


BATCH = (torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(4) % 5)


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(make_model(), cross_entropy, BATCH)


def test_halves_come_weight_gradient_first_and_only_the_first_reads_x(captured):
    tape = captured.tape
    split = split_convolutions(tape)
    assert len(splittable_ops(tape)) == 3 and len(split.ops) == len(tape.ops) + 3
    assert (split.storages, split.tensors, split.loss) == (tape.storages, tape.tensors, tape.loss)
    for whole in splittable_ops(tape):
        x = tape.tensors[whole.args[1]["tensor"]]
        weight, data = (op for op in split.ops if set(op.outputs) & set(whole.outputs) - {None})
        assert data.id == weight.id + 1 and weight.outputs == (None, *whole.outputs[1:]) and data.outputs == (whole.outputs[0], None, None)
        assert x.storage in split.reads[weight.id] and x.storage not in split.reads[data.id]
        assert data.args[1] == {"form": {"dtype": "float32", "shape": list(x.shape), "strides": list(x.strides)}}


def test_halves_have_the_flops_of_the_whole(captured):
    whole, split = with_flops(captured.tape), with_flops(split_convolutions(captured.tape))
    assert sum(op.flops for op in split.ops) == sum(op.flops for op in whole.ops) > 0


def test_a_split_tape_survives_json_and_is_split_once(captured):
    split = split_convolutions(captured.tape)
    assert Tape.from_json(json.loads(json.dumps(split.to_json()))).digest == split.digest != captured.tape.digest
    assert split_convolutions(split).digest == split.digest and not splittable_ops(split)


@pytest.mark.parametrize("kept", [(), (0,), (1, 2), (0, 1, 2)])
def test_a_new_capture_is_split_like_the_planned_one(captured, kept):
    whole = {splittable_ops(captured.tape)[i].id for i in kept}
    planned = split_convolutions(captured.tape, whole)
    assert split_like(captured.tape, planned).digest == planned.digest
    assert split_like(captured.tape, captured.tape) is captured.tape


def reusing(tape: Tape):
    """The replay with every takeover of the backward, and each input of a convolution freed before the data gradient."""
    schedule = replay_schedule(tape)
    over = {op.id: op.takeover[1] for op in tape.ops if op.target == RELU_BACKWARD and op.takeover}
    instructions = []
    for i in schedule.instructions:
        if isinstance(i, Free) and i.storage in over.values():
            continue
        instructions.append(replace(i, reuse=over[i.op]) if isinstance(i, Compute) and i.op in over else i)
    return check_schedule(tape, replace(schedule, instructions=tuple(instructions)))


@pytest.mark.parametrize("channels_last", [False, True])
def test_split_ops_and_overwriting_relus_give_eagers_bits(channels_last):
    reused = []

    def make_step(model):
        captured = capture(model, cross_entropy, BATCH)
        captured = Captured(prepare_tape(captured.tape, [NEED], CPU).tape, captured.binding)
        checked = reusing(captured.tape)
        reused.append(sum(isinstance(i, Compute) and captured.tape.ops[i.op].target == RELU_BACKWARD and i.reuse is not None
                          for i in checked.schedule.instructions))
        executor = Executor(captured, checked, model)
        return lambda *inputs: executor(*inputs, verify=True).loss

    assert differences(lambda: make_model(channels_last), cross_entropy, BATCH, make_step) == []
    assert reused[0] == 2


def test_split_ops_have_measured_costs(captured, tmp_path):
    tape = measure_costs(split_convolutions(captured.tape), "cpu", cache_dir=tmp_path)
    assert all(op.seconds > 0 for op in tape.ops if op.target == "aten.convolution_backward.default")


def test_x_may_not_be_freed_before_the_weight_gradient(captured):
    """The checker's refusal of an overwrite that comes too early."""
    tape = split_convolutions(captured.tape)
    data = next(op for op in tape.ops if "form" in str(op.args) and op.target == "aten.convolution_backward.default")
    weight = tape.ops[data.id - 1]
    x = tape.tensors[weight.args[1]["tensor"]].storage
    instructions = [i for i in replay_schedule(tape).instructions if i != Free(x)]
    at = next(k for k, i in enumerate(instructions) if isinstance(i, Compute) and i.op == weight.id)
    for early in ([Free(x)], [Compute(data.id), Free(x)]):  # freed before it, or the data gradient first and over x
        order = [i for i in instructions if not (isinstance(i, Compute) and i.op == data.id)] if len(early) > 1 else instructions
        schedule = replace(replay_schedule(tape), instructions=(*order[:at], *early, *order[at:]))
        with pytest.raises(ScheduleError, match="input-not-readable"):
            check_schedule(tape, schedule)


# --- asking the kernels ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def question(captured) -> Question:
    return question_of(captured.tape, splittable_ops(captured.tape)[-1])


def test_a_right_split_is_exact(question):
    assert are_exact({"a": question}, "cpu") == {"a": True}


def test_a_wrong_split_is_found(question):
    """Another padding, a half that is not asked for its gradient, one that reads another tensor in the weight's place."""
    weight, data = question.halves
    args = {i: list(data.args) for i in range(2)}
    args[0][8], args[1][10] = [1, 1] if args[0][8] == [0, 0] else [0, 0], [False, False, False]
    for wrong in args.values():
        assert are_exact({"a": replace(question, halves=(weight, replace(data, args=wrong)))}, "cpu") == {"a": False}
    no_bias = replace(weight, args=[*weight.args[:10], [False, True, False]])
    has_bias = weight.args[10][2]
    assert are_exact({"a": replace(question, halves=(no_bias, data))}, "cpu") == {"a": not has_bias}


def test_one_ulp_is_found(question, monkeypatch):
    run = prepared._run

    def off_by_one_ulp(op, inputs, device):
        result = list(run(op, inputs, device))
        if op is question.halves[1]:
            result[0].view(-1)[0] = torch.nextafter(result[0].view(-1)[0], torch.tensor(float("inf")))
        return result

    monkeypatch.setattr(prepared, "_run", off_by_one_ulp)
    assert are_exact({"a": question}, "cpu") == {"a": False}


def test_the_kernels_are_asked_in_a_process_of_its_own(question):
    huge = {t: replace(form, shape=(1 << 50,), strides=(1,)) for t, form in question.tensors.items()}
    assert ask({"bad": replace(question, tensors=huge)}, CPU) == {"bad": False}


def test_a_question_that_ends_its_process_is_a_no_for_itself_alone(monkeypatch):
    def isolated(call, timeout_seconds):
        questions, _device = call.args
        if "deadly" in questions:
            return CallResult(outcome=Outcome.CRASHED)
        return CallResult(outcome=Outcome.OK, value=dict.fromkeys(questions, True))

    monkeypatch.setattr(prepared, "run_isolated", isolated)
    assert ask(dict.fromkeys(["good", "deadly", "fine"]), CPU) == {"good": True, "deadly": False, "fine": True}


def test_answers_are_kept_and_a_no_keeps_the_op_whole(captured, tmp_path, monkeypatch):
    tape, asked = captured.tape, []

    def no_to_the_first(questions, device):
        asked.append(len(questions))
        return {name: i > 0 for i, name in enumerate(questions)}

    monkeypatch.setattr(prepared, "ask", no_to_the_first)
    for _ in range(2):
        found = prepare_tape(tape, [NEED], CPU, cache_dir=tmp_path)
        first = splittable_ops(tape)[0]
        assert found.splits.unsplit_ops == (tape.op_name(first.id),) and found.splits.split_ops == 2 and found.splits.is_checked
        assert found.tape.digest == split_convolutions(tape, {first.id}).digest
    assert asked == [3, 0]


def test_a_simulated_target_splits_all_and_says_that_nothing_was_checked(captured):
    found = prepare_tape(captured.tape, [NEED], None)
    assert (found.splits.split_ops, found.splits.unsplit_ops, found.splits.is_checked) == (3, (), False)
    assert prepare_tape(captured.tape, ["backward"], None) is None
