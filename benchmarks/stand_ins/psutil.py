"""What vramlab reads of psutil, from Linux's /proc, for machines on which psutil is not installed and nothing can be.

Only `gpu_check.py` puts this folder on the path, behind everything else: where there is a psutil, that one is used.
"""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path

Memory = namedtuple("Memory", "total available")
ProcessMemory = namedtuple("ProcessMemory", "rss")
Times = namedtuple("Times", "user system")
IoCounters = namedtuple("IoCounters", "read_bytes write_bytes")
_PROC = Path("/proc")
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class NoSuchProcess(Exception):
    """The process is gone."""


class AccessDenied(Exception):
    """The process belongs to somebody else."""


def virtual_memory() -> Memory:
    """Bytes of main memory, and how many of them a process could still get."""
    kilobytes = dict(line.split(":") for line in (_PROC / "meminfo").read_text().splitlines())
    return Memory(*(int(kilobytes[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")))


def cpu_count(logical: bool = True) -> int | None:
    """Logical or physical cores."""
    if logical:
        return os.cpu_count()
    blocks = (dict(_pairs(block)) for block in (_PROC / "cpuinfo").read_text().split("\n\n"))
    return len({(b.get("physical id"), b["core id"]) for b in blocks if "core id" in b}) or None


def cpu_freq() -> None:
    """No clock: psutil's own rules for it are long."""


def _pairs(block: str) -> list[tuple[str, str]]:
    return [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in block.splitlines())]


class Process:
    """One process by its number."""

    def __init__(self, pid: int | None = None) -> None:
        self.pid = os.getpid() if pid is None else pid
        self._read("stat")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Process) and self.pid == other.pid

    def __hash__(self) -> int:
        return hash(self.pid)

    def children(self, recursive: bool = False) -> list[Process]:
        """Processes that it started, with theirs if `recursive`."""
        found = [p for p in map(_process, _pids()) if p is not None and p._parent() == self.pid]
        return found + [grandchild for p in found for grandchild in p.children(True)] if recursive else found

    def memory_info(self) -> ProcessMemory:
        """Bytes in main memory."""
        return ProcessMemory(int(self._read("statm").split()[1]) * _PAGE)

    def cpu_times(self) -> Times:
        """Seconds of processor time."""
        fields = self._stat()
        return Times(int(fields[11]) / _TICKS, int(fields[12]) / _TICKS)

    def io_counters(self) -> IoCounters:
        """Bytes read from and written to storage."""
        counts = dict(_pairs(self._read("io")))
        return IoCounters(int(counts["read_bytes"]), int(counts["write_bytes"]))

    def _parent(self) -> int:
        try:
            return int(self._stat()[1])
        except NoSuchProcess:
            return -1

    def _stat(self) -> list[str]:
        """What follows the name, which may hold blanks itself."""
        return self._read("stat").rpartition(")")[2].split()

    def _read(self, name: str) -> str:
        try:
            return (_PROC / str(self.pid) / name).read_text()
        except (FileNotFoundError, ProcessLookupError):
            raise NoSuchProcess(self.pid) from None
        except PermissionError:
            raise AccessDenied(self.pid) from None


def _pids() -> list[int]:
    return [int(p.name) for p in _PROC.iterdir() if p.name.isdigit()]


def _process(pid: int) -> Process | None:
    try:
        return Process(pid)
    except NoSuchProcess:
        return None
