"""What NVIDIA's management library says about a GPU, through nvidia-ml-py (`pynvml`), never through torch.

Drivers, products and MIG slices each lack some fields. A field that cannot be had is None with the driver's own reason;
no call here raises once the library is open.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping

GPU_COLUMNS = ("gpu_memory_used_bytes", "gpu_memory_reserved_bytes", "gpu_memory_free_bytes", "gpu_process_memory_bytes",
               "gpu_busy_percent", "gpu_memory_busy_percent", "power_watts", "energy_joules", "temperature_celsius",
               "sm_clock_mhz", "memory_clock_mhz", "throttle_reasons", "pcie_sent_bytes", "pcie_received_bytes")

# Member of a field's value by its NVML_VALUE_TYPE.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_INSTANT = "NVML_FI_DEV_POWER_INSTANT"
# What nvmlDeviceGetPowerUsage gives, by NVIDIA's documentation of it.
_POWER_USAGE = "an average over 1 s on Ampere (GA100 excepted) and newer, instantaneous on older ones"


class Nvml:
    """The open library; `failure` says why there is none. Close it with `with` or `close()`."""

    def __init__(self, library: Any, failure: str = "") -> None:
        self._library, self.failure = library, failure

    @classmethod
    def open(cls, library: Any = None) -> Nvml:
        """Start NVML. `library` is the pynvml module (tests give their own)."""
        if library is None:
            try:
                import pynvml as library
            except ImportError:
                return cls(None, "nvidia-ml-py is not installed")
        if not hasattr(library, "nvmlDeviceGetMemoryInfo"):
            return cls(None, "the module pynvml is not NVIDIA's nvidia-ml-py")
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            return cls(None, f"no NVIDIA driver answers: {error}")
        return cls(library)

    def close(self) -> None:
        """Shut NVML down."""
        if self._library is not None:
            self.ask("nvmlShutdown")
            self._library = None

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, name: str, *arguments: Any, **keywords: Any) -> tuple[Any, str]:
        """Call one function of the library: (value, "") or (None, why)."""
        function = getattr(self._library, name, None)
        if function is None:
            return None, f"this nvidia-ml-py has no {name}"
        try:
            return function(*arguments, **keywords), ""
        except self._library.NVMLError as error:
            return None, f"{name}: {error}"

    def field(self, handle: Any, name: str) -> tuple[Any, str]:
        """One of NVML's fields, by the name of its constant: (value, "") or (None, why)."""
        number = getattr(self._library, name, None)
        if number is None:
            return None, f"this nvidia-ml-py has no {name}"
        answers, reason = self.ask("nvmlDeviceGetFieldValues", handle, [number])
        if answers is None:
            return None, reason
        (answer,) = answers
        if answer.nvmlReturn:
            return None, f"{name}: {self._library.NVMLError(answer.nvmlReturn)}"
        return getattr(answer.value, _MEMBERS[answer.valueType]), ""

    def constant(self, name: str) -> Any:
        """A constant of the library."""
        return getattr(self._library, name)

    def count(self) -> int:
        """How many GPUs NVML lists."""
        return self.ask("nvmlDeviceGetCount")[0] or 0

    def find(self, uuid: str) -> tuple[Any, str]:
        """(handle, "") of the GPU or MIG slice with this UUID, in CUDA's spelling or NVML's; else (None, why)."""
        spelled = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return self.ask("nvmlDeviceGetHandleByUUID", spelled)

    def find_cuda(self, index: int, environment: Mapping[str, str]) -> tuple[Any, str]:
        """(handle, "") of CUDA device `index` as a process with these variables numbers it, else (None, why).

        CUDA_VISIBLE_DEVICES renumbers, by index or by UUID. CUDA's default order puts the fastest first and NVML's goes by PCI
        address: they are the same only when CUDA_DEVICE_ORDER says so or all GPUs are alike, else there is no telling.
        """
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        names = [n.strip() for n in visible.split(",")] if visible is not None else [str(i) for i in range(self.count())]
        if index >= len(names) or names[index] in ("", "-1"):
            return None, f"CUDA_VISIBLE_DEVICES={visible} has no device {index}" if visible is not None else f"NVML lists no GPU {index}"
        if not names[index].isdigit():
            return self.find(names[index])
        if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and not self._are_alike():
            return None, "GPUs differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID, so NVML's numbers are not CUDA's"
        return self.ask("nvmlDeviceGetHandleByIndex", int(names[index]))

    def _are_alike(self) -> bool:
        handles = (self.ask("nvmlDeviceGetHandleByIndex", i)[0] for i in range(self.count()))
        return len({self.ask("nvmlDeviceGetName", handle)[0] for handle in handles}) <= 1

    def describe(self, index: int) -> dict[str, Any]:
        """What is fixed about a GPU, for the environment of a record. The UUID is hashed; `missing` says why a value is None."""
        handle, reason = self.ask("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            return {"index": index, "missing": {"handle": reason}}
        return {"index": index, **self.describe_handle(handle)}

    def describe_handle(self, handle: Any) -> dict[str, Any]:
        """`describe` of an open handle."""
        from vramlab.environment import hash_identity

        missing: dict[str, str] = {}
        found: dict[str, Any] = {}
        for field, (function, extra) in self._fixed_facts().items():
            found[field], reason = self.ask(function, *(() if function.startswith("nvmlSystem") else (handle,)), *extra)
            if reason:
                missing[field] = reason
        memory, _ = self.memory(handle)
        uuid = found.pop("uuid")
        limit = found.pop("power_limit_milliwatts")
        found["uuid_hash"] = hash_identity(uuid) if uuid else None
        found["power_limit_watts"] = limit / 1000 if limit is not None else None
        found["memory_bytes"] = memory["total"]
        found["power_is"] = "instantaneous" if not self.field(handle, _INSTANT)[1] else _POWER_USAGE
        found["power_covers"] = self._power_covers(handle, found["mig_mode"])
        found["compute_capability"] = ".".join(map(str, found["compute_capability"])) if found["compute_capability"] else None
        return {**found, "missing": missing}

    def _power_covers(self, handle: Any, mig_mode: Any) -> str:
        is_slice = self.ask("nvmlDeviceIsMigDeviceHandle", handle)[0] or (mig_mode and mig_mode[0])
        return "the whole board, which MIG slices share" if is_slice else "the board"

    def _fixed_facts(self) -> Mapping[str, tuple[str, tuple[Any, ...]]]:
        return {
            "name": ("nvmlDeviceGetName", ()),
            "uuid": ("nvmlDeviceGetUUID", ()),
            "driver": ("nvmlSystemGetDriverVersion", ()),
            "cuda_driver": ("nvmlSystemGetCudaDriverVersion", ()),
            "compute_capability": ("nvmlDeviceGetCudaComputeCapability", ()),
            "vbios": ("nvmlDeviceGetVbiosVersion", ()),
            "pcie_generation": ("nvmlDeviceGetCurrPcieLinkGeneration", ()),
            "pcie_generation_max": ("nvmlDeviceGetMaxPcieLinkGeneration", ()),
            "pcie_width": ("nvmlDeviceGetCurrPcieLinkWidth", ()),
            "pcie_width_max": ("nvmlDeviceGetMaxPcieLinkWidth", ()),
            "power_limit_milliwatts": ("nvmlDeviceGetEnforcedPowerLimit", ()),
            "sm_clock_max_mhz": ("nvmlDeviceGetMaxClockInfo", (self.constant("NVML_CLOCK_SM"),)),
            "persistence_mode": ("nvmlDeviceGetPersistenceMode", ()),
            "ecc_mode": ("nvmlDeviceGetEccMode", ()),
            "mig_mode": ("nvmlDeviceGetMigMode", ()),
        }

    def memory(self, handle: Any) -> tuple[dict[str, int | None], str]:
        """Bytes used, reserved by the driver, free and total. Version 2 keeps the driver's share out of `used`; where only
        version 1 exists, `reserved` is None and the reason says what `used` then holds."""
        info, reason = self.ask("nvmlDeviceGetMemoryInfo", handle, version=getattr(self._library, "nvmlMemory_v2", None))
        if info is not None and hasattr(info, "reserved"):
            return {"used": info.used, "reserved": info.reserved, "free": info.free, "total": info.total}, ""
        old, old_reason = self.ask("nvmlDeviceGetMemoryInfo", handle)
        if old is None:
            return dict.fromkeys(("used", "reserved", "free", "total")), old_reason or reason
        note = "the driver answers version 1 only: used bytes hold what the driver reserves"
        return {"used": old.used, "reserved": None, "free": old.free, "total": old.total}, note

    def sample(self, handle: Any, pids: Iterable[int], missing: dict[str, str]) -> dict[str, float | int | None]:
        """One value for each of GPU_COLUMNS; reasons for None are added to `missing`."""
        memory, memory_note = self.memory(handle)
        row: dict[str, Any] = dict.fromkeys(GPU_COLUMNS)
        row["gpu_memory_used_bytes"], row["gpu_memory_free_bytes"] = memory["used"], memory["free"]
        row["gpu_memory_reserved_bytes"] = memory["reserved"]
        if memory_note:
            missing.setdefault("gpu_memory_reserved_bytes", memory_note)
        row["gpu_process_memory_bytes"], reason = self.process_memory(handle, pids)
        if reason:
            missing.setdefault("gpu_process_memory_bytes", reason)
        for column, read in self._readings(handle).items():
            row[column], reason = read()
            if reason:
                missing.setdefault(column, reason)
        return row

    def _readings(self, handle: Any) -> dict[str, Callable[[], tuple[Any, str]]]:
        def scaled(name: str, scale: float) -> tuple[Any, str]:
            value, reason = self.ask(name, handle)
            return (value / scale if value is not None else None), reason

        def power() -> tuple[Any, str]:
            milliwatts, reason = self.field(handle, _INSTANT)
            return scaled("nvmlDeviceGetPowerUsage", 1000) if reason else (milliwatts / 1000, "")

        def busy(attribute: str) -> tuple[Any, str]:
            rates, reason = self.ask("nvmlDeviceGetUtilizationRates", handle)
            return (getattr(rates, attribute) if rates is not None else None), reason

        def clock(kind: str) -> tuple[Any, str]:
            return self.ask("nvmlDeviceGetClockInfo", handle, self.constant(kind))

        def throttle() -> tuple[Any, str]:
            value, reason = self.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
            return (value, reason) if value is not None else self.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)

        return {
            "gpu_busy_percent": lambda: busy("gpu"),
            "gpu_memory_busy_percent": lambda: busy("memory"),
            "power_watts": power,
            "energy_joules": lambda: scaled("nvmlDeviceGetTotalEnergyConsumption", 1000),
            "temperature_celsius": lambda: self.ask("nvmlDeviceGetTemperature", handle, self.constant("NVML_TEMPERATURE_GPU")),
            "sm_clock_mhz": lambda: clock("NVML_CLOCK_SM"),
            "memory_clock_mhz": lambda: clock("NVML_CLOCK_MEM"),
            "throttle_reasons": throttle,
            "pcie_sent_bytes": lambda: self.field(handle, "NVML_FI_DEV_PCIE_COUNT_TX_BYTES"),
            "pcie_received_bytes": lambda: self.field(handle, "NVML_FI_DEV_PCIE_COUNT_RX_BYTES"),
        }

    def process_memory(self, handle: Any, pids: Iterable[int]) -> tuple[int | None, str]:
        """Bytes that these processes hold on the GPU, over the driver's compute, graphics and MPS lists. A driver outside
        this PID namespace lists other numbers: then there is no value, rather than 0."""
        wanted, held, reasons = set(pids), {}, []
        for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses",
                     "nvmlDeviceGetMPSComputeRunningProcesses"):
            listed, reason = self.ask(name, handle)
            reasons.append(reason)
            held.update({p.pid: p.usedGpuMemory for p in listed or () if p.pid in wanted})
        if not held:
            return None, next(filter(None, reasons), "the driver lists none of these processes on this GPU")
        if any(nbytes is None for nbytes in held.values()):
            return None, "the driver does not tell how much a process holds"
        return sum(held.values()), ""
