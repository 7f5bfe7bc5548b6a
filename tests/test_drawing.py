"""The colours and the files of drawings: apart for colour-blind eyes, fonts embedded, the same bytes."""

from __future__ import annotations

import math
import re
import zlib
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from vramlab.report import drawing

STYLE = Path(__file__).parent.parent / "reports" / "styles" / "report.css"
# Severity 1.0 of Machado, Oliveira and Fernandes 2009, on linear RGB.
SEEN_BY = {
    "everyone": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
}
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
DISTINCT = 10.0  # CIEDE2000: two colours apart at a glance; 2.3 is just noticed


def lab(colour: str, eye: str = "everyone") -> tuple[float, float, float]:
    """CIE Lab, D65, of a hex colour as an eye sees it."""
    rgb = np.array([int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = (TO_XYZ @ np.clip(SEEN_BY[eye] @ linear, 0, 1)) / np.array([0.95047, 1.0, 1.08883])
    fx, fy, fz = (math.cbrt(v) if v > 216 / 24389 else (24389 / 27 * v + 16) / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def ciede2000(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    """Sharma, Wu and Dalal 2005."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    g = 0.5 * (1 - math.sqrt(mean**7 / (mean**7 + 25**7)))
    c1, c2 = math.hypot(a1 * (1 + g), b1), math.hypot(a2 * (1 + g), b2)
    h1, h2 = (math.degrees(math.atan2(b, a * (1 + g))) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    hue = h1 + h2 if c1 * c2 == 0 else (h1 + turn / 2) % 360
    lightness, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    t = (1 - 0.17 * math.cos(math.radians(hue - 30)) + 0.24 * math.cos(math.radians(2 * hue))
         + 0.32 * math.cos(math.radians(3 * hue + 6)) - 0.2 * math.cos(math.radians(4 * hue - 63)))
    sl = 1 + 0.015 * (lightness - 50) ** 2 / math.sqrt(20 + (lightness - 50) ** 2)
    sc, sh = 1 + 0.045 * chroma, 1 + 0.015 * chroma * t
    rotation = -2 * math.sqrt(chroma**7 / (chroma**7 + 25**7)) * math.sin(math.radians(60 * math.exp(-(((hue - 275) / 25) ** 2))))
    dl, dc, dh = (l2 - l1) / sl, (c2 - c1) / sc, 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2)) / sh
    return math.sqrt(dl**2 + dc**2 + dh**2 + rotation * dc * dh)


def closest(colours: list[str]) -> tuple[float, str]:
    """(distance, eye) of the two colours that are hardest to tell apart."""
    return min((ciede2000(lab(a, eye), lab(b, eye)), eye) for eye in SEEN_BY for a, b in combinations(colours, 2))


def series(theme: str) -> list[str]:
    style = STYLE.read_text()
    start = {"light": 0, "dark": style.index("prefers-color-scheme: dark"), "print": style.index("@media print")}[theme]
    return [re.compile(rf"--series-{i}: (#[0-9a-f]{{6}})").search(style, start)[1] for i in range(1, 9)]


@pytest.mark.parametrize(("one", "other", "distance"), [  # pairs 1, 7, 17 and 25 of Sharma's test data
    ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425), ((50, 0, 0), (50, -1, 2), 2.3669), ((50, 2.5, 0), (73, 25, -18), 27.1492),
    ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
])
def test_the_distance_is_ciede2000(one, other, distance):
    assert ciede2000(one, other) == pytest.approx(distance, abs=5e-5)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_all_series_stay_apart_for_colour_blind_eyes(theme):
    distance, eye = closest(series(theme))
    assert distance >= DISTINCT, eye


def test_colours_that_only_some_eyes_tell_apart_are_found():
    """The negative control: an earlier palette of this report, apart for most eyes and one colour for some."""
    vermillion, ochre = "#d55e00", "#b87a00"
    assert ciede2000(lab(vermillion), lab(ochre)) > DISTINCT
    assert closest([vermillion, ochre]) < (1.0, "") and closest([vermillion, ochre])[1] == "deuteranopia"


def test_a_drawing_has_the_colours_of_the_light_page():
    style = STYLE.read_text()
    assert list(drawing.SERIES) == series("light")
    for colour, variable in drawing.VARIABLES.items():
        assert f"{variable[4:-1]}: {colour};" in style[:style.index("@media")]


def draw(label: str = "a method") -> drawing.Panel:
    with drawing.panel_axes("a title") as (figure, axes):
        axes.plot([0, 1], [0, 2], color=drawing.SERIES[0], marker="o", label=label)
        return drawing.finish(figure, name="one", title="a title", description="words")


def streams(pdf: bytes) -> bytes:
    """All that a PDF holds, unpacked."""
    found = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL)
    return b"\n".join(zlib.decompress(part) for part in found)


def test_the_pdf_embeds_its_fonts_as_venues_ask_and_keeps_real_colours():
    pdf = draw().pdf
    assert pdf.startswith(b"%PDF-") and b"/FontFile2" in pdf and b"/Type3" not in pdf and b"(a title)" in pdf
    blue = " ".join(f"{int(drawing.SERIES[0][i:i + 2], 16) / 255:.4f}"[:5] for i in (1, 3, 5)).split()
    operators = re.findall(rb"([\d.]+) ([\d.]+) ([\d.]+) RG", streams(pdf))
    assert any(all(float(v) == pytest.approx(float(b), abs=2e-3) for v, b in zip(found, blue)) for found in operators)


def test_the_same_drawing_gives_the_same_bytes_and_another_one_others():
    assert draw() == draw()
    assert draw().pdf != draw("another").pdf and draw().svg != draw("another").svg


def test_a_colour_in_a_name_is_text():
    panel = draw("#0072b2")
    assert "#0072b2" in panel.svg and panel.svg.count("var(--series-1)") >= 2


@pytest.mark.parametrize("name", ['a="#123456"', 'id="x" href="#y"', "url(#z)", ' d="M 1.23456 7.89123"'])
def test_what_looks_like_markup_in_a_name_is_text(name):
    assert name.strip() in draw(name).svg


def test_coordinates_are_short_and_where_they_were():
    with drawing.panel_axes("x") as (figure, axes):
        axes.plot([0, 1], [0, 1 / 3], color=drawing.SERIES[0])
        panel = drawing.finish(figure, name="short", title="x", description="x")
        figure.draw_without_rendering()
        ends = axes.transData.transform([(0, 0), (1, 1 / 3)]) * 72 / figure.dpi
    numbers = re.findall(r'd="M (\S+) (\S+) \nL (\S+) (\S+) ?\n?"[^>]*stroke: var\(--series-1\)', panel.svg)
    height = 72 * figure.get_figheight()
    assert [float(v) for v in numbers[0]] == pytest.approx([ends[0][0], height - ends[0][1], ends[1][0], height - ends[1][1]], abs=0.006)
    assert not re.search(r' (?:d|x|y)="[^"]*\d\.\d{3}', panel.svg)


def test_a_colour_outside_the_palette_is_refused():
    with drawing.panel_axes("x") as (figure, axes):
        axes.plot([0, 1], [0, 1], color="#123456")
        with pytest.raises(KeyError, match="#123456"):
            drawing.finish(figure, name="bad", title="x", description="x")
