"""What this machine can do, found out by looking: one line for each finding, with the fix beside what is missing."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Iterator

import psutil

from vramlab.child import child_environment
from vramlab.counted import count_of
from vramlab.environment import cache_dir, package_version
from vramlab.errors import EnvironmentUnable, WorkflowError
from vramlab.this_machine import known_profiles
from vramlab.workflow import Host
from vramlab.yaml_nodes import nearest, offer

SUPPORTED_PYTHONS = ((3, 11), (3, 12), (3, 13))
ENOUGH_MEMORY_BYTES = 4 * 2**30
ENOUGH_DISK_BYTES = 2 * 2**30
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PROBE = """
import json, torch
devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
named = [(torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory) for i in devices]
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "devices": named,
    "mps": torch.backends.mps.is_available(), "xpu": hasattr(torch, "xpu") and torch.xpu.is_available(),
}))
"""


class State(StrEnum):
    """How a finding stands."""

    GOOD = "ok"
    LIMITED = "limited"  # vramlab runs, but not with all it can do
    BROKEN = "broken"  # nothing runs


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`."""

    what: str
    state: State
    said: str
    fix: str = ""


@dataclass(frozen=True)
class TorchFacts:
    """What torch says in a process of its own; `error` when it does not load."""

    version: str = ""
    cuda: str | None = None
    hip: str | None = None
    devices: tuple[tuple[str, int], ...] = ()  # name, bytes
    mps: bool = False
    xpu: bool = False
    error: str = ""

    @property
    def cuda_devices(self) -> int:
        """NVIDIA GPUs that torch can use. AMD's answer to the same calls, and are not meant."""
        return 0 if self.hip else len(self.devices)


@lru_cache(maxsize=1)
def probe_torch() -> TorchFacts:
    """Ask torch, in another process: this one stays light, and a driver that crashes crashes there."""
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=120, env=child_environment({}))
    except subprocess.TimeoutExpired:
        return TorchFacts(error="importing torch takes more than 120 s")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return TorchFacts(error=said[-1] if said else f"importing torch ends with exit code {done.returncode}")
    body = json.loads(done.stdout.splitlines()[-1])
    return TorchFacts(**{**body, "devices": tuple((name, nbytes) for name, nbytes in body["devices"])})


def count_cuda_devices() -> int:
    """NVIDIA GPUs that torch can use. Torch is asked only where a driver has left its device files."""
    has_driver = any(any(Path("/dev").glob(pattern)) for pattern in ("nvidia[0-9]*", "dxg", "nvhost-gpu", "nvmap"))
    return probe_torch().cuda_devices if has_driver else 0


def detect_host(device: str) -> Host:
    """What `auto` stands for: `device`, or where that is auto the first NVIDIA GPU, else the CPU.

    WorkflowError on another word; EnvironmentUnable when the GPU that is asked for is not there.
    """
    kind, _, name = device.partition(":")
    if kind == "sim" and name in known_profiles():
        return Host(device, count_cuda_devices())
    if kind == "sim":
        raise WorkflowError(f"--device: there is no device profile {name!r}{offer(name, known_profiles(), 'there are', '`list devices`')}")
    if device != "auto" and device != "cpu" and not (kind == "cuda" and name.isdecimal()):
        like = _like(device)
        told = f"{like} Allowed" if like else "; allowed"
        raise WorkflowError(f"--device {device!r} is not allowed{told}: auto, cpu, cuda:0, sim:NAME (`list devices` shows the names)")
    devices = count_cuda_devices()
    if device == "auto":
        return Host("cuda:0" if devices else "cpu", devices)
    if kind == "cuda" and int(name) >= devices:
        raise EnvironmentUnable(f"--device {device}: torch finds {count_of(devices, 'NVIDIA GPU')} on this machine; "
                                "`doctor` says why, and --device cpu or sim:NAME need none")
    return Host(device, devices)


def _like(device: str) -> str:
    """`; did you mean ...?`: the profiles that begin so, else the nearest spelling of a profile or another target."""
    profiles = [f"sim:{name}" for name in known_profiles()]
    begun = [name for name in profiles if len(device) > 1 and name.startswith(f"sim:{device.lower()}")]
    if begun:
        return f"; did you mean {' or '.join(map(repr, begun))}?"
    return nearest(device, ["auto", "cpu", "cuda:0"]) or nearest(f"sim:{device}", profiles)


def examine(results: Path) -> list[Finding]:
    """Every finding, the broken ones included."""
    facts = probe_torch()
    return [_python(), _torch(facts), *_accelerators(facts), _memory(), _disk(results), _cache(), _pinned_memory(facts), _chromium()]


def can_run(findings: list[Finding]) -> bool:
    """False when nothing at all can run here."""
    return all(finding.state is not State.BROKEN for finding in findings)


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] in SUPPORTED_PYTHONS:
        return Finding("python", State.GOOD, version)
    return Finding("python", State.BROKEN, f"{version} is not supported", "install Python 3.11, 3.12 or 3.13")


def _torch(facts: TorchFacts) -> Finding:
    if not package_version("torch"):
        return Finding("torch", State.BROKEN, "not installed", "pip install torch torchvision")
    if facts.error:
        return Finding("torch", State.BROKEN, f"does not load: {facts.error}", "install torch and torchvision of versions that go together")
    return Finding("torch", State.GOOD, facts.version)


def _accelerators(facts: TorchFacts) -> Iterator[Finding]:
    yield _cuda(facts)
    for name, is_there, whose in (("ROCm", bool(facts.hip), "AMD"), ("MPS", facts.mps, "Apple"), ("XPU", facts.xpu, "Intel")):
        if is_there:
            yield Finding(name, State.LIMITED, f"torch finds a GPU of {whose}, which vramlab does not use: simulation and the CPU only")


def _cuda(facts: TorchFacts) -> Finding:
    if facts.cuda_devices:
        named = ", ".join(f"cuda:{i} {name} with {nbytes / 2**30:.1f} GiB" for i, (name, nbytes) in enumerate(facts.devices))
        return Finding("CUDA", State.GOOD, f"{facts.cuda}; {named}")
    if facts.error:
        return Finding("CUDA", State.LIMITED, "not known, since torch does not load")
    has_driver = shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia[0-9]*"))
    if has_driver and not facts.cuda:
        return Finding("CUDA", State.LIMITED, "there is an NVIDIA driver, but torch is built without CUDA",
                       "install a CUDA build of torch; until then: simulation and the CPU")
    if has_driver:
        return Finding("CUDA", State.LIMITED, f"there is an NVIDIA driver, but torch {facts.version} finds no GPU",
                       "compare the driver's version with torch's CUDA, and look at CUDA_VISIBLE_DEVICES")
    return Finding("CUDA", State.LIMITED, "no NVIDIA GPU: simulation and the CPU only")


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    said = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"
    if memory.available >= ENOUGH_MEMORY_BYTES:
        return Finding("memory", State.GOOD, said)
    return Finding("memory", State.LIMITED, said, "close other programs, or lower batch_sizes")


def _disk(results: Path) -> Finding:
    there = next(path for path in (results.absolute(), *results.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        return Finding("disk", State.BROKEN, f"{there} cannot be written", "go to a directory of yours, or give --output-dir")
    if free < ENOUGH_DISK_BYTES:
        return Finding("disk", State.LIMITED, f"{free / 2**30:.1f} GiB free for {results}", "make room, or give --output-dir")
    return Finding("disk", State.GOOD, f"{free / 2**30:.1f} GiB free for {results}")


def _cache() -> Finding:
    folder = cache_dir()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(there, os.W_OK):
        return Finding("cache", State.GOOD, str(folder))
    return Finding("cache", State.BROKEN, f"{folder} cannot be written", "set XDG_CACHE_HOME to a directory of yours")


def _pinned_memory(facts: TorchFacts) -> Finding:
    """CUDA pins host memory outside this limit on most systems, but containers may enforce it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("pinned memory", State.GOOD, "no limit")
    said = f"RLIMIT_MEMLOCK is {limit / 2**20:.0f} MiB"
    if not facts.cuda_devices:
        return Finding("pinned memory", State.GOOD, f"{said}; without a GPU nothing is pinned")
    return Finding("pinned memory", State.GOOD, f"{said}; should offloading fail, raise it: ulimit -l unlimited")


def _chromium() -> Finding:
    found = next((name for name in CHROMIUMS if shutil.which(name)), None)
    if found:
        return Finding("chromium", State.GOOD, found)
    return Finding("chromium", State.LIMITED, "not found; only the tests of report.html need it", "apt install chromium")
