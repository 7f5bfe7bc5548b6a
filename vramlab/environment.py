"""What software and hardware a record comes from, probed and never asked. Nothing here imports torch.

Names that identify a person or a machine (host name, user name, GPU UUIDs) are hashed before they leave this file: the
hash is salted with a number that stays on this machine, so that it says "the same machine" and cannot be guessed back.
"""

from __future__ import annotations

import ast
import getpass
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from vramlab import __version__

KEY_PACKAGES = ("torch", "torchvision", "numpy", "numba", "pandas", "psutil", "nvidia-ml-py", "matplotlib", "seaborn")
VARIABLE_PREFIXES = ("CUDA_", "PYTORCH_", "TORCH_", "NCCL_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "NVIDIA_")
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASS")
CHECKOUT = Path(__file__).resolve().parent.parent


def probe(*, with_installed: bool = False) -> dict[str, Any]:
    """Software and hardware of this process: JSON-able; a fact that cannot be had is None and `missing` says why.

    `with_installed` lists every installed distribution; a hash over the list is always there.
    """
    missing: dict[str, str] = {}
    installed = installed_distributions()
    return {
        "software": probe_software(installed, missing) | ({"installed": installed} if with_installed else {}),
        "system": probe_system(missing),
        "cpu": probe_cpu(missing),
        "gpus": probe_gpus(missing),
        "git": probe_git(CHECKOUT, missing),
        "variables": probe_variables(),
        "missing": missing,
    }


def installed_distributions() -> list[str]:
    """`name==version` of every installed distribution, sorted."""
    return sorted({f"{(d.metadata['Name'] or '').lower()}=={d.version}" for d in importlib.metadata.distributions()})


def probe_software(installed: list[str], missing: dict[str, str]) -> dict[str, Any]:
    """Versions of vramlab, Python, torch's build, key packages, compilers; a hash over every installed distribution."""
    return {
        "vramlab": __version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "packages": {name: package_version(name) for name in KEY_PACKAGES},
        "installed_sha256": hashlib.sha256("\n".join(installed).encode()).hexdigest(),
        "torch_build": torch_build(missing),
        "compilers": {name: _version_line([name, "--version"], missing, f"software.compilers.{name}") for name in ("gcc", "nvcc")},
    }


def package_version(name: str) -> str | None:
    """Installed version from the package's metadata, None when it is not installed. Imports nothing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_build(missing: dict[str, str]) -> dict[str, Any]:
    """`cuda`, `hip` and `git_version` as torch's version file states them, read as text: importing torch takes seconds."""
    build: dict[str, Any] = {"cuda": None, "hip": None, "git_version": None}
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if path is None or not path.is_file():
        missing["software.torch_build"] = "torch is not installed"
        return build
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"(cuda|hip|git_version)\s*(?::[^=]*)?=\s*(None|'[^']*'|\"[^\"]*\")\s*", line)
        if match:
            build[match[1]] = ast.literal_eval(match[2])
    return build


def probe_system(missing: dict[str, str]) -> dict[str, Any]:
    """Operating system, kernel, container; host and user as salted hashes."""
    return {
        "os": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "distribution": _distribution(missing),
        "in_container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        "is_administrator": os.geteuid() == 0 if hasattr(os, "geteuid") else None,
        "host_hash": hash_identity(platform.node()),
        "user_hash": hash_identity(_user_name()),
    }


def probe_cpu(missing: dict[str, str]) -> dict[str, Any]:
    """Model, cores, frequency and memory of the host."""
    frequency = psutil.cpu_freq()
    if frequency is None:
        missing["cpu.frequency_mhz"] = "the system reports no clock"
    return {
        "model": _cpu_model(missing),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "frequency_mhz": round(frequency.max or frequency.current) if frequency else None,
        "memory_bytes": psutil.virtual_memory().total,
        "memory_limit_bytes": _container_memory_limit(missing),
    }


def probe_gpus(missing: dict[str, str]) -> list[dict[str, Any]]:
    """One entry a GPU that NVML lists (PCI order, not CUDA's order); empty with a reason where there is none."""
    from vramlab.nvml import Nvml

    nvml = Nvml.open()
    if nvml.failure:
        missing["gpus"] = nvml.failure
        return []
    with nvml:
        return [nvml.describe(index) for index in range(nvml.count())]


def probe_git(folder: Path, missing: dict[str, str]) -> dict[str, Any] | None:
    """Commit, whether files differ from it, and the hash of that difference; None outside a checkout of `folder` itself."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != folder:
        missing["git"] = "not run from a git checkout of vramlab"
        return None
    status = _git(folder, "status", "--porcelain") or ""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        missing["git.commit"] = "the checkout has no commit"
    changes = _git(folder, "diff", "HEAD") or ""
    return {
        "commit": commit,
        "dirty": bool(status),
        "changes_sha256": hashlib.sha256((status + changes).encode()).hexdigest() if status else None,
    }


def probe_variables() -> dict[str, str]:
    """Environment variables that change how torch, CUDA and the math libraries behave. Never one that looks like a secret."""
    chosen = {name: value for name, value in os.environ.items() if name.startswith(VARIABLE_PREFIXES)}
    return {name: chosen[name] for name in sorted(chosen) if not any(word in name for word in SECRET_WORDS)}


def hash_identity(text: str) -> str:
    """16 hex digits that stand for a host, a user or a UUID: equal here for equal text, and not to be guessed back."""
    return hashlib.sha256(f"{_salt()}:{text}".encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def _salt() -> str:
    """128 random bits of this installation: the system's machine id, else a number kept in the user's cache folder."""
    machine_id = Path("/etc/machine-id")
    if machine_id.is_file() and len(text := machine_id.read_text().strip()) >= 32:
        return text
    path = cache_dir() / "salt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "x", encoding="ascii") as f:
                f.write(secrets.token_hex(16))
        except FileExistsError:  # another process was first; its salt holds
            pass
    return path.read_text().strip()


def cache_dir() -> Path:
    """The user's cache folder of vramlab."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vramlab"


def config_dir() -> Path:
    """The user's config folder of vramlab."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "vramlab"


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number without a name
        return str(os.getuid()) if hasattr(os, "getuid") else ""


def _distribution(missing: dict[str, str]) -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        if sys.platform == "darwin":
            return f"macOS {platform.mac_ver()[0]}"
        missing["system.distribution"] = "the system has no os-release file"
        return None


def _cpu_model(missing: dict[str, str]) -> str | None:
    path = Path("/proc/cpuinfo")
    if path.is_file() and (match := re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE)):
        return match[1].strip()
    if platform.processor():
        return platform.processor()
    missing["cpu.model"] = "the system names no processor"
    return None


def _container_memory_limit(missing: dict[str, str]) -> int | None:
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.is_file() and (text := path.read_text().strip()).isdigit() and int(text) < psutil.virtual_memory().total:
            return int(text)
    missing["cpu.memory_limit_bytes"] = "no control group limits memory below what the machine has"
    return None


def _version_line(command: list[str], missing: dict[str, str], name: str) -> str | None:
    if shutil.which(command[0]) is None:
        missing[name] = f"{command[0]} is not installed"
        return None
    lines = [line.strip() for line in (_run(command) or "").splitlines() if re.search(r"\d+\.\d+", line)]
    if not lines:
        missing[name] = f"{' '.join(command)} names no version"
        return None
    return lines[0]


def _git(folder: Path, *words: str) -> str | None:
    return _run(["git", "-C", str(folder), *words]) if shutil.which("git") else None


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
