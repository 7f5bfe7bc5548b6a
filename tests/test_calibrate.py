"""Rates of this machine and the profile `sim:this`: measured, kept, used, and refused where there is none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from shelves import small_workflow, write_method, write_model, write_workflow

from vramlab import rates
from vramlab.calibration import measure_profile
from vramlab.cli import main
from vramlab.collection import Library
from vramlab.device import load_profile
from vramlab.errors import EnvironmentUnable
from vramlab.rates import Convolution, convolution_flops_per_second, least_seconds, matrix_flops_per_second
from vramlab.record import hash_config
from vramlab.this_machine import Calibration, Rate, is_calibrated, keep_calibration, known_profiles, open_profile
from vramlab.workflow import Host, expand, load_workflow

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def calibration(flops: float = 1e10) -> Calibration:
    profile = replace(load_profile("k40c"), name="A processor, 2 threads", flops_per_second=flops)
    return Calibration(device="cpu", profile=profile, rates=(Rate(what="launch of an op", value=2e-6, unit="s", source="measured"),),
                       missing={"link": "a CPU has none"})


def test_flops_of_a_shape_are_counted_by_hand(monkeypatch):
    """With every run taking one second the rate is the number of operations."""
    def a_second(run, device, *, runs):
        run()
        return 1.0

    monkeypatch.setattr(rates, "least_seconds", a_second)
    assert matrix_flops_per_second(2, 3, 5, CPU) == 2 * 2 * 3 * 5
    plain = Convolution(what="", x=(2, 4, 8, 8), weight=(6, 4, 3, 3))
    assert convolution_flops_per_second(plain, CPU) == 3 * 2 * (2 * 8 * 8) * (6 * 4 * 9)
    halved = Convolution(what="", x=(2, 3, 8, 8), weight=(6, 3, 7, 7), stride=2)
    assert convolution_flops_per_second(halved, CPU) == 3 * 2 * (2 * 4 * 4) * (6 * 3 * 49)
    depthwise = Convolution(what="", x=(2, 4, 8, 8), weight=(4, 1, 3, 3), groups=4)
    assert convolution_flops_per_second(depthwise, CPU) == 3 * 2 * (2 * 8 * 8) * (4 * 9)


def test_the_least_of_the_runs_counts_and_the_first_does_not(monkeypatch):
    clock = iter([0, 1, 10, 15, 20, 23, 30, 34])  # runs of 1 (warm-up), 5, 3 and 4 seconds
    monkeypatch.setattr(rates.time, "perf_counter", lambda: next(clock))
    assert least_seconds(lambda: None, CPU, runs=3) == 3


def test_a_cpus_rates_and_what_it_has_not():
    found = rates.measure_rates(CPU)
    assert all(r["value"] > 0 and r["source"].startswith("measured") for r in found["rates"])
    assert sum("convolution" in r["what"] for r in found["rates"]) == 5 and sum("matrix" in r["what"] for r in found["rates"]) == 3
    assert set(found["missing"]) == {"link", "copy latency", "pinned allocation"}
    assert json.loads(json.dumps(found)) == found


def test_a_machine_that_is_measured_in_the_middle_of_a_program_leaves_its_random_numbers(tmp_path):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    measure_profile("cpu", cache_dir=tmp_path)
    assert torch.equal(torch.get_rng_state(), before) and list(tmp_path.iterdir())
    matrix_flops_per_second(2, 3, 5, CPU)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
def test_a_gpus_link_and_its_pinned_memory():
    found = {r["what"]: r["value"] for r in rates.measure_rates(torch.device("cuda"))["rates"]}
    one_way = min(found["link to the host, alone"], found["link to the device, alone"])
    assert one_way > 1e9 and found["link, both ways at once, sum"] > 0.9 * one_way
    assert 0 < found["copy latency"] < 1e-3 and 0 < found["pinned allocation of 64 MiB"] < 5


def test_what_was_measured_is_this():
    assert not is_calibrated() and known_profiles()[-1] == "this"
    with pytest.raises(EnvironmentUnable, match="run `calibrate`"):
        open_profile("this")
    keep_calibration(calibration())
    assert is_calibrated() and open_profile("this") == calibration().profile
    assert open_profile("k40c") == load_profile("k40c")


def plan_of(tmp_path):
    root = tmp_path / "shelf"
    if not root.exists():
        write_method(root, "toy-good")
        write_model(root)
        write_workflow(root, small_workflow('["toy-good"]', targets=["sim:this", "sim:k40c"]))
    return expand(load_workflow(root / "workflows" / "small.yaml", Library([root])), Host())


def test_a_cell_on_this_carries_the_profile_and_another_calibration_is_another_cell(tmp_path):
    plan = plan_of(tmp_path)
    assert [c.config["target"] for c in plan.cells] == ["sim:k40c"] and "profile" not in plan.cells[0].config
    assert [(out.target, "calibrate" in out.reason) for out in plan.left_out] == [("sim:this", True)]
    keep_calibration(calibration())
    one = plan_of(tmp_path).cells[0]
    assert one.config["profile"]["flops_per_second"] == 1e10 and one.cell_id == hash_config(one.config)
    keep_calibration(calibration(flops=2e10))
    assert plan_of(tmp_path).cells[0].cell_id != one.cell_id


@pytest.mark.slow
def test_the_command_measures_once_and_again_when_asked(capsys):
    assert main(["calibrate", "--device", "cpu", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["device"] == "cpu" and open_profile("this").flops_per_second == first["profile"]["flops_per_second"]
    assert main(["calibrate", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "convolution, 3x3 depthwise" in said and "paced: v100-32gb's" in said and "a CPU has no link" in said
    assert open_profile("this").flops_per_second == first["profile"]["flops_per_second"]
    assert main(["list", "devices"]) == 0 and "\nthis " in capsys.readouterr().out
    assert main(["calibrate", "--device", "sim:k40c"]) == 2
    assert "allowed: auto, cpu, cuda:0" in capsys.readouterr().err
