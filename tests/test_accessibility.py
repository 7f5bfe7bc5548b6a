"""The report as a screen reader and a keyboard meet it: Chromium's own accessibility tree, walked over DevTools.

Each control and each landmark has a name, each figure a text alternative that holds its numbers, each table its headings, each heading its
level, and the tabulator reaches every control in the order of the page. A page with each fault planted is found faulty.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Page, browser
from hand_made import CLAIMS, MIB, full_grid, measured_step, write_run, write_telemetry
from test_timelines import drawable
from timeline_steps import PLAIN, SWAPPING, schedule_of, swapping_tape

from vramlab.doctor import CHROMIUMS
from vramlab.report import render

CONTROLS = {"button", "link", "combobox", "listbox", "textbox", "searchbox", "checkbox", "radio", "slider", "spinbutton", "switch", "tab",
            "menuitem", "DisclosureTriangle", "ComboBoxMenuButton", "PopUpButton"}
PICTURES = {"image", "img", "graphics-document", "graphics-symbol"}
LANDMARKS = ("banner", "navigation", "main", "contentinfo")
NAMELESS = {"banner", "main", "contentinfo"}  # there is one of each
FOCUS = """(() => {
  const found = [];
  const seen = e => e.checkVisibility({contentVisibilityAuto: true, visibilityProperty: true});
  for (const e of document.querySelectorAll("a[href], button, select, input, summary, [tabindex='0']")) if (seen(e)) found.push(e);
  return found.length;
})()"""
ACTIVE = """(() => {
  const e = document.activeElement;
  return e === document.body ? "" : `${e.tagName} ${e.id || e.name || ""} ${(e.getAttribute("aria-label") || e.textContent).slice(0, 40)}`;
})()"""


class Node:
    """A node of the tree: role, name, description, properties, children."""

    def __init__(self, body: dict, by_id: dict[str, dict]) -> None:
        self.role = body.get("role", {}).get("value", "")
        self.name = str(body.get("name", {}).get("value") or "").strip()
        self.description = str(body.get("description", {}).get("value") or "").strip()
        self.level = next((p["value"]["value"] for p in body.get("properties", ()) if p["name"] == "level"), None)
        self._children, self._by_id = body.get("childIds", ()), by_id
        self.is_ignored = body.get("ignored", False)

    @property
    def below(self) -> Iterator[Node]:
        """All nodes below, those that are left out of the tree stepped over."""
        for name in self._children:
            if name in self._by_id:
                child = Node(self._by_id[name], self._by_id)
                if not child.is_ignored:
                    yield child
                yield from child.below


def tree(page: Page) -> list[Node]:
    """The whole page's, in its order."""
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    by_id = {node["nodeId"]: node for node in nodes}
    root = Node(nodes[0], by_id)
    return [root, *root.below]


def faults(nodes: list[Node]) -> list[str]:
    """What somebody who does not see the page would miss."""
    found = [f"{n.role} without a name" for n in nodes if n.role in CONTROLS | PICTURES and not n.name]
    found += [f"{n.role} without a name" for n in nodes if n.role in (*LANDMARKS, "region", "group", "form") and not n.name
              and n.role not in NAMELESS and n.role != "group"]
    found += [f"{sum(n.role == role for n in nodes)} of {role}" for role in LANDMARKS if sum(n.role == role for n in nodes) != 1]
    for figure in (n for n in nodes if n.role == "figure"):
        pictures = [n for n in figure.below if n.role in PICTURES]
        if not pictures or not all(n.name and n.description for n in pictures):
            found.append(f"figure without a text alternative: {figure.name or [n.name for n in figure.below][:3]}")
    for table in (n for n in nodes if n.role in ("table", "grid", "LayoutTable")):
        if not any(n.role in ("columnheader", "rowheader") for n in table.below):
            found.append(f"table without headings: {table.name}")
    levels = [(int(n.level), n.name) for n in nodes if n.role == "heading" and n.level]
    found += [f"heading without words of level {level}" for level, name in levels if not name]
    found += [f"{name}: level {level} below {before}" for (before, _), (level, name) in zip(levels, levels[1:]) if level > before + 1]
    if [level for level, _ in levels].count(1) != 1 or not nodes[0].name:
        found.append("not one title")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run with every part of the report: claims, figures, a timeline, searches, a training, telemetry."""
    tape = swapping_tape()
    runs = {"eager": schedule_of(tape, PLAIN), "delta": schedule_of(tape, SWAPPING)}
    records = [drawable(measured_step(name, 1, budget=None if name == "eager" else "60%", config={"experiment": "drawn"}), tape, runs[name])
               for name in runs]
    at_peak = {"by_role": {"activation": 400 * MIB}, "inside_op_bytes": MIB, "phase": "backward", "by_layer": {"a": MIB}}
    grid = [replace(r, predicted=r.predicted | {"at_peak": at_peak}) if r.kind == "step" and r.predicted else r for r in full_grid()]
    folder = write_run(tmp_path_factory.mktemp("read-aloud") / "run", [*records, *grid], claims=CLAIMS)
    for record, schedule in zip(records, runs.values()):
        tape.save(folder / "cells" / record.cell_id / "tape.json.gz")
        schedule.save(folder / "cells" / record.cell_id / "schedule.json.gz")
    write_telemetry(folder / "cells" / records[0].cell_id / "telemetry.csv.gz", [(0.1 * i, (500 + i) * MIB) for i in range(50)])
    render(folder)
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    chromium = next(path for name in CHROMIUMS if (path := shutil.which(name)))
    with browser(chromium, tmp_path_factory.mktemp("profile")) as page:
        page.call("Accessibility.enable")
        yield page


@pytest.mark.chromium
@pytest.mark.parametrize("width", [390, 1300])
def test_all_of_the_report_is_named(folder, page, width):
    page.said.clear()
    page.open(folder / "report.html", width=width)
    page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    nodes = tree(page)
    assert faults(nodes) == [] and page.said == []
    roles = [n.role for n in nodes]
    assert roles.count("figure") > 8 and roles.count("table") > 6 and {"combobox", "radio", "button"} <= set(roles)
    assert page.run("document.documentElement.lang") == "en"


@pytest.mark.chromium
def test_a_figures_text_alternative_holds_its_numbers(folder, page):
    page.open(folder / "report.html")
    told = {n.name: n.description for n in tree(page) if n.role in PICTURES}
    peaks = next(text for name, text in told.items() if name.startswith("Peak against budget") and "checkpoint" in text)
    assert "delta: 595 MiB peak at 600 MiB budget" in peaks and "delta simulated: 595 MiB peak at 600 MiB budget" in peaks


@pytest.mark.chromium
def test_the_timeline_says_what_it_shows_and_keeps_loose_words_to_itself(folder, page):
    page.open(folder / "report.html")
    (plot,) = (n for n in tree(page) if n.name.startswith("Memory timeline, simulated"))
    assert re.fullmatch(r"Memory timeline, simulated: eager, peak \S+ \S+; delta 60 %, peak \S+ \S+", plot.name)
    assert plot.description.startswith("Drag to zoom") and not [n.name for n in plot.below if n.role in ("StaticText", "InlineTextBox")
                                                               and re.match(r"\d", n.name)]


@pytest.mark.chromium
def test_the_tabulator_reaches_every_control_in_the_order_of_the_page(folder, page):
    page.open(folder / "report.html")
    wanted, seen = page.run(FOCUS), []
    for _ in range(wanted + 5):
        page.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        page.call("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        if not (active := page.run(ACTIVE)) or (seen and active == seen[0] and len(seen) > 3):
            break
        seen.append(active)
    assert seen[0].startswith("A  Skip to the answer") and any("timeline-left" in s for s in seen) and any("SUMMARY" in s for s in seen)
    radios = 2  # of each group of two, the tabulator stops at one
    assert wanted - radios <= len(seen) <= wanted


PLANTED = {
    "button without a name": "<button></button>", "link without a name": '<a href="#x"></a>',
    "image without a name": '<svg role="img" width="9" height="9"></svg>', "combobox without a name": "<select><option>a</select>",
    "figure without a text alternative": '<figure><svg role="img" aria-label="named" width="9" height="9"></svg></figure>',
    "table without headings": "<table><tr><td>1<td>2<tr><td>3<td>4</table>", "level 4 below 2": "<h4>too deep</h4>",
    "not one title": "<h1>another</h1>", "2 of main": "<main>another</main>", "heading without words": "<h2></h2>",
}
SOUND = ('<!doctype html><html lang="en"><title>t</title><header><h1>t</h1><nav aria-label="n"><a href="#x">x</a></nav></header>'
         "<main><h2>a</h2>PLANTED</main><footer>f</footer></html>")


@pytest.mark.chromium
def test_each_planted_fault_is_found_and_a_sound_page_has_none(page, tmp_path):
    for fault, html in {"": "", **PLANTED}.items():
        body = SOUND.replace("PLANTED</main>", f"</main>{html}" if "main" in html else f"{html}</main>")
        (tmp_path / "page.html").write_text(body)
        found = faults(tree(page.open(tmp_path / "page.html")))
        assert any(fault in text for text in found) if fault else found == [], (fault, found)
