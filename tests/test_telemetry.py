"""The sampler against what the test itself did: bytes it held, seconds it computed, processes it killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Callable

import psutil
import pytest
from fake_nvml import UUID, FakeNvml

from vramlab.nvml import GPU_COLUMNS, Nvml
from vramlab.telemetry import COLUMNS, Sampler, Telemetry, read_telemetry, run_sampler


def take_samples(path: Path, count: int, *, library: FakeNvml | None = None, target: str = "cpu",
                 pauses: dict[int, float] | None = None, period_seconds: float = 0.02) -> None:
    """Run the sampler in this process for `count` samples; `pauses` holds extra seconds after a sample."""
    taken = 0

    def is_over(seconds: float, watch: Callable[[int], None]) -> bool:
        nonlocal taken
        time.sleep(seconds + (pauses or {}).get(taken, 0.0))
        taken += 1
        return taken == count

    run_sampler(path, pid=os.getpid(), target=target, period_seconds=period_seconds, is_over=is_over, library=library)


def test_it_sees_the_bytes_and_the_processor_time_that_the_process_used(tmp_path):
    path = tmp_path / "telemetry.csv.gz"
    with Sampler(path, period_seconds=0.05) as sampler:
        deadline = time.monotonic() + 60  # the first sample must lie before the allocation: it is on disk after the first flush
        while time.monotonic() < deadline and not (path.exists() and path.stat().st_size):
            time.sleep(0.02)
        cpu_before, held = time.process_time(), bytearray(b"x" * 200_000_000)
        while time.process_time() - cpu_before < 0.8:
            sum(range(1000))
        time.sleep(0.3)
    used = time.process_time() - cpu_before
    columns = read_telemetry(path).columns
    assert sampler.summary["failure"] is None
    assert max(columns["rss_bytes"]) - columns["rss_bytes"][0] >= 0.95 * len(held)
    spans = [b - a for a, b in pairwise(columns["t_seconds"])]
    sampled = sum(percent / 100 * span for percent, span in zip(columns["cpu_percent"][1:], spans, strict=True))
    assert sampled == pytest.approx(used, rel=0.25, abs=0.15)


def test_it_sees_a_process_that_is_no_descendant_once_it_is_told(tmp_path):
    """A child that sleeps is sampled, and this process beside it from the first sample after `watch` on."""
    path, own = tmp_path / "telemetry.csv.gz", psutil.Process().memory_info().rss
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with Sampler(path, pid=child.pid, period_seconds=0.05) as sampler:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not (path.exists() and path.stat().st_size):
                time.sleep(0.02)
            sampler.watch(2**22 + 1)  # no process has so high a number
            sampler.watch(os.getpid())
            time.sleep(1)
    finally:
        child.communicate(b"\n")
    rss = read_telemetry(path).columns["rss_bytes"]
    assert sampler.summary["failure"] is None
    assert rss[0] < 0.5 * own < own < rss[-1] * 1.05


def test_columns_are_the_same_on_every_machine_and_absent_ones_say_why(tmp_path):
    take_samples(tmp_path / "cpu.csv.gz", 3)
    take_samples(tmp_path / "gpu.csv.gz", 3, library=FakeNvml(), target=UUID)
    cpu, gpu = read_telemetry(tmp_path / "cpu.csv.gz"), read_telemetry(tmp_path / "gpu.csv.gz")
    assert tuple(cpu.columns) == tuple(gpu.columns) == COLUMNS
    for name in GPU_COLUMNS:
        assert cpu.columns[name] == [None] * 3
        assert cpu.header["missing"][name] == "the cell ran on no GPU"


def test_gpu_readings_have_the_units_of_their_names(tmp_path):
    library = FakeNvml(processes=((os.getpid(), 640), (1, 99)))
    take_samples(tmp_path / "t.csv.gz", 2, library=library, target=UUID.removeprefix("GPU-"))
    read = read_telemetry(tmp_path / "t.csv.gz")
    last = {name: values[-1] for name, values in read.columns.items()}
    assert library.asked_uuid == UUID
    assert (last["gpu_memory_used_bytes"], last["gpu_memory_reserved_bytes"], last["gpu_memory_free_bytes"]) == (1000, 300, 7000)
    assert (last["power_watts"], last["energy_joules"], last["temperature_celsius"]) == (251.5, 9000.5, 63)
    assert (last["sm_clock_mhz"], last["memory_clock_mhz"]) == (1380, 877)
    assert (last["gpu_busy_percent"], last["gpu_memory_busy_percent"]) == (87, 41)
    assert last["throttle_reasons"] == 4
    assert UUID not in str(read.header) and read.header["gpu"]["name"] == "Tesla V100-SXM2-32GB"


def test_a_field_that_the_gpu_lacks_is_null_with_the_drivers_reason(tmp_path):
    library = FakeNvml(refuse=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates"), processes=((os.getpid(), 640),))
    take_samples(tmp_path / "t.csv.gz", 2, library=library, target=UUID)
    read = read_telemetry(tmp_path / "t.csv.gz")
    assert read.columns["power_watts"] == read.columns["gpu_busy_percent"] == [None, None]
    assert read.trailer["missing"]["power_watts"] == "nvmlDeviceGetPowerUsage: Not Supported"
    assert read.columns["temperature_celsius"] == [63, 63]
    assert read.columns["gpu_process_memory_bytes"] == [640, 640]


def test_fields_are_read_by_their_value_type_and_instantaneous_power_goes_first(tmp_path):
    library = FakeNvml(fields={186: (1, 180_250), 197: (3, 7 * 2**40), 198: (3, 11)})
    take_samples(tmp_path / "t.csv.gz", 2, library=library, target=UUID)
    read = read_telemetry(tmp_path / "t.csv.gz")
    assert (read.columns["power_watts"], read.header["gpu"]["power_is"]) == ([180.25] * 2, "instantaneous")
    assert (read.columns["pcie_sent_bytes"][-1], read.columns["pcie_received_bytes"][-1]) == (7 * 2**40, 11)


def test_where_fields_are_not_supported_power_says_what_it_is_and_pcie_is_null(tmp_path):
    take_samples(tmp_path / "t.csv.gz", 2, library=FakeNvml(), target=UUID)
    read = read_telemetry(tmp_path / "t.csv.gz")
    assert read.columns["power_watts"] == [251.5] * 2 and "average over 1 s on Ampere" in read.header["gpu"]["power_is"]
    assert read.columns["pcie_sent_bytes"] == [None] * 2
    assert read.trailer["missing"]["pcie_sent_bytes"].startswith("NVML_FI_DEV_PCIE_COUNT_TX_BYTES: ")


@pytest.mark.parametrize("name", ["nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses",
                                  "nvmlDeviceGetMPSComputeRunningProcesses"])
def test_all_three_lists_of_processes_are_asked(name):
    library = FakeNvml()
    setattr(library, name, lambda handle: [SimpleNamespace(pid=7, usedGpuMemory=640)])
    assert Nvml.open(library).process_memory("handle", [7]) == (640, "")


def test_a_module_of_that_name_that_is_not_nvidias_is_refused():
    assert "not NVIDIA's nvidia-ml-py" in Nvml.open(SimpleNamespace(nvmlInit=lambda: None)).failure


def telemetry(seconds, power, energy, used=0.0, covers="the board") -> Telemetry:
    """Samples of a board, as they would be read."""
    columns = {name: [None] * len(seconds) for name in COLUMNS}
    columns |= {"t_seconds": seconds, "power_watts": power, "energy_joules": energy, "gpu_memory_used_bytes": [used] * len(seconds)}
    return Telemetry(header={"gpu": {"power_covers": covers}, "missing": {}, "period_seconds": 1.0}, trailer={}, columns=columns)


def test_flags_say_what_speaks_against_the_numbers():
    """100 W, then 300 W: trapezoids give 100 + 200 + 300 J over 3 s."""
    seconds, power = [0.0, 1.0, 2.0, 3.0], [100.0, 100.0, 300.0, 300.0]
    assert telemetry(seconds, power, [50.0, 150.0, 350.0, 650.0]).flags() == []
    assert telemetry(seconds, power, [50.0, 150.0, 350.0, 735.0]).flags() == []  # 685 J, within 15 %
    (gap,) = telemetry(seconds, power, [50.0, 150.0, 350.0, 745.0]).flags()
    assert gap == "the energy counter says 695 J and the power's integral 600 J"
    (short,) = telemetry(seconds[:3], power[:3], [0.0, 0.0, 0.0]).flags()
    assert "2.0 s are too short" in short
    assert telemetry(seconds, [None] * 4, [None] * 4).flags() == []
    (busy,) = telemetry(seconds, power, [0.0, 100.0, 300.0, 600.0], used=2.0**29).flags()
    assert busy.startswith("536,870,912 bytes of the GPU were in use before the cell began")
    covers = Nvml.open(FakeNvml(mig=True)).describe(0)["power_covers"]
    (shared,) = telemetry(seconds, power, [0.0, 100.0, 300.0, 600.0], covers=covers).flags()
    assert "whole board" in shared


def test_a_driver_with_memory_version_1_is_marked(tmp_path):
    take_samples(tmp_path / "t.csv.gz", 1, library=FakeNvml(memory_version=1), target=UUID)
    read = read_telemetry(tmp_path / "t.csv.gz")
    assert read.columns["gpu_memory_used_bytes"] == [1300] and read.columns["gpu_memory_reserved_bytes"] == [None]
    assert "version 1" in read.trailer["missing"]["gpu_memory_reserved_bytes"]


@pytest.mark.parametrize("processes", [((987_654_321, 640),), ((os.getpid(), None),)])
def test_process_memory_is_never_zero_for_want_of_knowledge(processes):
    value, reason = Nvml.open(FakeNvml(processes=processes)).process_memory("handle", [os.getpid()])
    assert value is None and reason


def test_a_uuid_that_nvml_does_not_list_costs_the_gpu_columns_only(tmp_path):
    take_samples(tmp_path / "t.csv.gz", 2, library=FakeNvml(), target="GPU-none")
    read = read_telemetry(tmp_path / "t.csv.gz")
    assert read.columns["gpu_memory_used_bytes"] == [None, None] and "Not Found" in read.header["missing"]["gpu_memory_used_bytes"]
    assert min(read.columns["rss_bytes"]) > 0


@pytest.mark.parametrize(("index", "variables", "expected"), [
    (0, {}, 0), (1, {}, 1), (0, {"CUDA_VISIBLE_DEVICES": "1"}, 1), (1, {"CUDA_VISIBLE_DEVICES": "1,0"}, 0),
    (0, {"CUDA_VISIBLE_DEVICES": f"{UUID},1"}, UUID), (0, {"CUDA_VISIBLE_DEVICES": ""}, None), (1, {"CUDA_VISIBLE_DEVICES": "1"}, None),
    (2, {}, None), (0, {"CUDA_VISIBLE_DEVICES": "-1"}, None),
])
def test_cudas_numbers_become_nvmls(index, variables, expected):
    handle, reason = Nvml.open(TwoGpus(alike=True)).find_cuda(index, variables)
    assert handle == expected and bool(reason) == (expected is None)


def test_unlike_gpus_are_not_told_apart_by_number():
    nvml = Nvml.open(TwoGpus(alike=False))
    assert nvml.find_cuda(0, {}) == (None, "GPUs differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID, so NVML's numbers are not CUDA's")
    assert nvml.find_cuda(1, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == (1, "")
    assert nvml.find_cuda(0, {"CUDA_VISIBLE_DEVICES": UUID}) == (UUID, "")


class TwoGpus(FakeNvml):
    """Two GPUs whose handles are their PCI numbers, or their UUIDs when found by those."""

    def __init__(self, *, alike: bool) -> None:
        super().__init__()
        self.alike = alike

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetName(self, handle: int | str) -> str:
        return "V100" if self.alike else f"board {handle}"


def test_missed_samples_are_counted(tmp_path):
    take_samples(tmp_path / "t.csv.gz", 6, pauses={2: 0.35}, period_seconds=0.1)
    trailer = read_telemetry(tmp_path / "t.csv.gz").trailer
    assert trailer["rows"] == 6 and trailer["missed"] in (3, 4)  # 0.35 s at 0.1 s a sample, and no more
    assert trailer["achieved_period_seconds"] > 0.15


def test_a_killed_sampler_leaves_the_run_and_its_samples(tmp_path):
    path = tmp_path / "telemetry.csv.gz"
    sampler = Sampler(path, period_seconds=0.05).start()
    time.sleep(3.5)  # past the first flush
    sampler._child.send_signal(signal.SIGKILL)
    summary = sampler.stop()
    assert "ended before the run" in summary["failure"] and summary["rows"] >= 5


def test_a_folder_that_cannot_be_made_is_a_failure_in_the_summary_only(tmp_path):
    (tmp_path / "file").write_text("")
    with Sampler(tmp_path / "file" / "telemetry.csv.gz") as sampler:
        pass
    assert sampler.summary["failure"].startswith("the sampler could not start")


def test_the_sampler_ends_when_the_run_is_killed(tmp_path):
    path = tmp_path / "telemetry.csv.gz"
    script = ("import os, signal, sys, time\nfrom pathlib import Path\nfrom vramlab.telemetry import Sampler\n"
              "s = Sampler(Path(sys.argv[1]), period_seconds=0.05).start()\nprint(s._child.pid, flush=True)\n"
              "time.sleep(1.5)\nos.kill(os.getpid(), signal.SIGKILL)\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    run = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, env=environment, timeout=60)
    sampler_pid = int(run.stdout)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(sampler_pid) and psutil.Process(sampler_pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert run.returncode == -signal.SIGKILL
    assert not psutil.pid_exists(sampler_pid) or psutil.Process(sampler_pid).status() == psutil.STATUS_ZOMBIE
    assert read_telemetry(path).trailer["rows"] >= 3


def test_garbage_is_refused(tmp_path):
    path = tmp_path / "t.csv.gz"
    for data in (b"", b"not gzip at all", b"\x1f\x8b"):
        path.write_bytes(data)
        with pytest.raises(ValueError):
            read_telemetry(path)
