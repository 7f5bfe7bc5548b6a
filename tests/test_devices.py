"""Device profiles: each number has a source, and agrees with what the board's published clocks and widths come to."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import pytest

from vramlab.device import DeviceProfile, load_profile, profile_names

GIB = 2**30
# name: (capacity in GiB, cores, MHz of the published peak, memory bus bits, Gbit/s a pin, PCIe GT/s), from the vendor's
# tables of the chip: the profiles state totals, so what these multiply out to is a second way to the same number.
BOARDS = {
    "k40c": (12, 2880, 745, 384, 6.0, 8),
    "titan-x-maxwell": (12, 3072, 1075, 384, 7.01, 8),
    "titan-x-pascal": (12, 3584, 1531, 384, 10.0, 8),
    "titan-v": (12, 5120, 1455, 3072, 1.7, 8),
    "m40": (12, 3072, 1114, 384, 6.0, 8),
    "p100": (16, 3584, 1303, 4096, 1.43, 8),
    "v100-16gb": (16, 5120, 1530, 4096, 1.752, 8),
    "v100-32gb": (32, 5120, 1530, 4096, 1.752, 8),
    "gtx-1080-ti": (11, 3584, 1582, 352, 11.0, 8),
    "a100-40gb": (40, 6912, 1410, 5120, 2.43, 16),
    "a100-80gb": (80, 6912, 1410, 5120, 3.186, 16),
    "h100": (80, 16896, 1980, 5120, 5.238, 32),
    "h200": (141, 16896, 1980, 6144, 6.25, 32),
    "rtx-4090": (24, 16384, 2520, 384, 21.0, 16),
}


# From the slowest board to the fastest by the vendor's tables; boards of one row are equal. The chips do not stand in one order:
# P100 has fewer FLOP/s than the Pascal boards with GDDR5X and more bandwidth, RTX 4090 the most FLOP/s and less bandwidth than an A100.
BY_FLOPS = [("k40c",), ("titan-x-maxwell",), ("m40",), ("p100",), ("titan-x-pascal",), ("gtx-1080-ti",), ("titan-v",),
            ("v100-16gb", "v100-32gb"), ("a100-40gb", "a100-80gb"), ("h100", "h200"), ("rtx-4090",)]
BY_BANDWIDTH = [("k40c", "m40"), ("titan-x-maxwell",), ("titan-x-pascal",), ("gtx-1080-ti",), ("titan-v",), ("p100",),
                ("v100-16gb", "v100-32gb"), ("rtx-4090",), ("a100-40gb",), ("a100-80gb",), ("h100",), ("h200",)]
GEN3 = ("k40c", "titan-x-maxwell", "m40", "p100", "titan-x-pascal", "gtx-1080-ti", "titan-v", "v100-16gb", "v100-32gb")
BY_LINK = [GEN3, ("a100-40gb", "a100-80gb", "rtx-4090"), ("h100", "h200")]  # PCI Express 3, 4, 5: each twice the one before


def misordered(field: str, order: list[tuple[str, ...]], profiles: dict[str, DeviceProfile]) -> list[tuple[str, ...]]:
    """Rows whose boards differ, and pairs of neighbouring rows that do not rise."""
    numbers = [{getattr(profiles[name], field) for name in row} for row in order]
    uneven = [row for row, found in zip(order, numbers) if len(found) > 1]
    return uneven + [(a[0], b[0]) for (a, x), (b, y) in pairwise(zip(order, numbers)) if max(x) >= min(y)]


def unsourced(profile: DeviceProfile) -> set[str]:
    """Fields of a profile without a sentence on where the number comes from."""
    numbers = {f.name for f in fields(profile)} - {"name", "sources"}
    return {n for n in numbers if len(profile.sources.get(n, "").split()) < 2}


def contradictions(profile: DeviceProfile) -> list[str]:
    """Where a profile departs from its board's clocks and widths."""
    gib, cores, mhz, bits, gbit, transfers = BOARDS[profile.name]
    link = transfers * 1e9 * 16 * 128 / 130 / 8
    checks = {
        "memory_bytes": profile.memory_bytes == gib * GIB,
        "flops_per_second": profile.flops_per_second == pytest.approx(2 * cores * mhz * 1e6, rel=0.01),
        "memory_bytes_per_second": profile.memory_bytes_per_second == pytest.approx(bits * gbit * 1e9 / 8, rel=0.01),
        "flops_efficiency": 0 < profile.flops_efficiency <= 1,
        "h2d_bytes_per_second": 0.7 * link <= profile.h2d_bytes_per_second <= 0.9 * link,
        "d2h_bytes_per_second": 0.7 * link <= profile.d2h_bytes_per_second <= 0.9 * link,
        "copy_latency_seconds": 1e-6 <= profile.copy_latency_seconds <= 1e-4,
        "launch_seconds": 1e-6 <= profile.launch_seconds <= 2e-5,
    }
    return [name for name, holds in checks.items() if not holds]


def test_every_profile_is_known_here():
    assert set(profile_names()) == set(BOARDS)


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_profile_has_sources_and_agrees_with_the_board(name):
    profile = load_profile(name)
    assert profile.name == name
    assert unsourced(profile) == set()
    assert set(profile.sources) <= {f.name for f in fields(profile)}
    assert contradictions(profile) == []


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_assumptions_say_so(name):
    sources = load_profile(name).sources
    for field in ("flops_efficiency", "copy_latency_seconds", "launch_seconds"):
        assert sources[field].startswith("assumption:")


@pytest.mark.parametrize("field, order", [
    ("flops_per_second", BY_FLOPS), ("memory_bytes_per_second", BY_BANDWIDTH), ("h2d_bytes_per_second", BY_LINK),
    ("d2h_bytes_per_second", BY_LINK),
])
def test_boards_stand_in_the_order_of_their_datasheets(field, order):
    profiles = {name: load_profile(name) for name in BOARDS}
    assert sorted(name for row in order for name in row) == sorted(BOARDS)
    assert misordered(field, order, profiles) == []
    profiles["h100"] = replace(profiles["h100"], **{field: getattr(profiles["k40c"], field)})  # negative control
    assert misordered(field, order, profiles) != []


def test_each_generation_of_the_link_is_twice_the_one_before():
    rates = [load_profile(row[0]).h2d_bytes_per_second for row in BY_LINK]
    assert rates == [rates[0], 2 * rates[0], 4 * rates[0]]


def test_the_checks_catch_a_wrong_profile():
    right = load_profile("v100-32gb")
    assert unsourced(replace(right, sources={k: v for k, v in right.sources.items() if k != "memory_bytes"})) == {"memory_bytes"}
    assert contradictions(replace(right, memory_bytes=32 * 10**9)) == ["memory_bytes"]
    assert contradictions(replace(right, flops_per_second=14e12)) == ["flops_per_second"]
    assert contradictions(replace(right, h2d_bytes_per_second=32e9)) == ["h2d_bytes_per_second"]


def test_copies_and_ops_take_the_time_that_the_numbers_say():
    v100 = load_profile("v100-32gb")
    assert v100.copy_seconds(12_800_000, to_host=True) == pytest.approx(1e-3 + 1e-5)
    assert v100.op_seconds(11_775_000_000, 0) == pytest.approx(1e-3)  # 15.7e12 * 0.75 FLOP/s
    assert v100.op_seconds(0, 900_000_000) == pytest.approx(1e-3)
    assert v100.op_seconds(1, 1) == 5e-6


@pytest.mark.parametrize("name", ["v100", "../device", "v100-32gb.json", ""])
def test_unknown_names_list_the_known(name):
    with pytest.raises(KeyError, match="v100-32gb"):
        load_profile(name)


@pytest.mark.parametrize(("name", "value"), [
    ("h2d_bytes_per_second", 0), ("d2h_bytes_per_second", -1.0), ("memory_bytes", 0), ("flops_per_second", float("nan")), ("devices", 0),
    ("copy_latency_seconds", float("inf")), ("launch_seconds", -1e-6)])
def test_a_device_at_whose_rates_nothing_runs_is_refused_by_name(name, value):
    profile = load_profile("v100-32gb")
    with pytest.raises(ValueError, match=f"'v100-32gb': {name} is"):
        replace(profile, **{name: value})
    assert replace(profile, copy_latency_seconds=0.0, launch_seconds=0.0).copy_seconds(0, to_host=True) == 0.0
