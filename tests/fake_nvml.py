"""A stand-in for the pynvml module: one GPU whose readings the test knows, with any function made to fail."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

UUID = "GPU-11112222-3333-4444-5555-666677778888"


class NVMLError(Exception):
    """What pynvml raises."""


class FakeNvml:
    """`refuse` names functions that answer 'Not Supported'; `processes` is [(pid, bytes)] on the compute list; `fields` maps a field's
    number to (its value type, its value), and all others answer 'Not Supported' (3), as Volta does with instantaneous power."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_FI_DEV_POWER_INSTANT, NVML_FI_DEV_PCIE_COUNT_TX_BYTES, NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 186, 197, 198
    nvmlMemory_v2 = 0x02000028

    def __init__(self, *, refuse: tuple[str, ...] = (), processes: tuple[tuple[int, int | None], ...] = (),
                 memory_version: int = 2, fields: Mapping[int, tuple[int, int]] | None = None, mig: bool = False) -> None:
        self._refuse, self._processes, self._memory_version = refuse, processes, memory_version
        self._fields, self._mig = fields or {}, mig
        self.asked_uuid = None

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "_refuse"):
            def refused(*arguments: Any, **keywords: Any) -> Any:
                raise NVMLError("Not Supported")
            return refused
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked_uuid = uuid
        if uuid != UUID:
            raise NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> SimpleNamespace:
        if version == self.nvmlMemory_v2:
            if self._memory_version < 2:
                raise NVMLError("Function Not Found")
            return SimpleNamespace(used=1000, reserved=300, free=7000, total=8300)
        return SimpleNamespace(used=1300, free=7000, total=8300)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=87, memory=41)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 251_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return 9_000_500

    def nvmlDeviceGetFieldValues(self, handle: str, numbers: list[int]) -> list[SimpleNamespace]:
        return [self._field(number) for number in numbers]

    def _field(self, number: int) -> SimpleNamespace:
        kind, value = self._fields.get(number, (0, None))
        union = SimpleNamespace(dVal=-1.0, uiVal=-1, ulVal=-1, ullVal=-1, sllVal=-1, siVal=-1, usVal=-1)
        setattr(union, ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")[kind], value)
        return SimpleNamespace(nvmlReturn=0 if number in self._fields else 3, valueType=kind, value=union)

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> int:
        return int(self._mig)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 63

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return {1: 1380, 2: 877}[kind]

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 1530

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return 4

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self._processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return []

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return []

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "Tesla V100-SXM2-32GB"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return UUID

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.10"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        return (7, 0)

    def nvmlDeviceGetVbiosVersion(self, handle: str) -> str:
        return "88.00"

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: str) -> int:
        return 3

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return 3

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: str) -> int:
        return 16

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return 16

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 300_000

    def nvmlDeviceGetPersistenceMode(self, handle: str) -> int:
        return 1

    def nvmlDeviceGetEccMode(self, handle: str) -> list[int]:
        return [1, 1]

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [0, 0]
