"""The pages in a real Chromium: nothing that a submitter wrote runs, nothing is asked of elsewhere, and all can be reached by keyboard."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import httpx
import pytest

from browser import browser
from collection_by_hand import fill
from served import ANSWER_SECONDS, serving
from test_pages import EVERY_PAGE
from vramlab.crowd.server.app import create_app
from vramlab.crowd.server.settings import Settings

pytestmark = pytest.mark.chromium

# Each would set a mark on the window, or break the statement or the page that it stands in, where a text is taken for anything else.
HOSTILE = ["<script>window.ran=1</script>", '"><img src=x onerror="window.ran=1">', "'; DROP TABLE result; --", "{{ 7 * 7 }}{% raw %}",
           "javascript:window.ran=1", "</title><svg onload=window.ran=1>", "]]><!--", "\u202eevil", "=HYPERLINK(1)"]


@dataclass(frozen=True)
class Address:
    """What `Page.open` takes."""

    text: str

    def as_uri(self) -> str:
        return self.text


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A collection in which every free text is hostile, in turn each way; (address, made)."""
    turn = iter(range(10**6))
    app = create_app(Settings(data_dir=tmp_path_factory.mktemp("server"), requests_per_minute=10**6))
    with serving(app) as address:
        with app.state.database.write() as session:
            made = fill(session, lambda text: f"{text} {HOSTILE[next(turn) % len(HOSTILE)]}")
        yield address, made


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    app = create_app(Settings(data_dir=tmp_path_factory.mktemp("server"), requests_per_minute=10**6))
    with serving(app) as address:
        with app.state.database.write() as session:
            made = fill(session)
        yield address, made


def pages_of(address, made):
    """Every page with every link that it has to others, as far as they are pages."""
    seen, todo = {}, [*EVERY_PAGE, *(f"/results/{number}" for number in made.results.values()), "/compare?result=1&result=2"]
    with httpx.Client(base_url=address, timeout=ANSWER_SECONDS) as client:
        while todo:
            path = todo.pop()
            if path not in seen and not path.startswith("/api/v1"):
                answer = client.get(path)
                seen[path] = answer
                if "html" in answer.headers["content-type"] and len(seen) < 150:
                    todo += [link.replace("&amp;", "&") for link in re.findall(r'href="(/[^"#]*)"', answer.text)]
    return {path: answer for path, answer in seen.items() if "html" in answer.headers["content-type"]}


def test_nothing_that_a_submitter_wrote_runs(chromium, tmp_path, hostile):
    address, made = hostile
    pages = pages_of(address, made)
    shown = "".join(answer.text for answer in pages.values())
    assert all(text in shown for text in ("&lt;script&gt;window.ran=1", "onerror=&#34;", "DROP TABLE", "{{ 7 * 7 }}", "&lt;svg onload"))
    with browser(chromium, tmp_path / "profile") as page:
        for path, answer in pages.items():
            page.open(Address(address + path))
            assert page.run("window.ran === undefined && document.querySelector('main h1') !== null"), path
            assert page.run("document.querySelectorAll('main script, main svg, main img').length") == 0, path
            said = [text for text in page.said if not (answer.status_code >= 400 and "Failed to load resource" in text)]
            assert said == [], (path, said)
            page.said.clear()
        assert [asked for asked in page.asked if not asked.startswith(address)] == []
    assert len(pages) > 40 and httpx.get(f"{address}/results/1", timeout=ANSWER_SECONDS).status_code == 200  # the table is still there


def test_the_test_above_would_see_what_runs(chromium, tmp_path):
    """The control: the same texts, not escaped, in a page without a policy."""
    (tmp_path / "page.html").write_text("<main><h1>x</h1>" + "".join(HOSTILE) + "</main>")
    with browser(chromium, tmp_path / "profile") as page:
        page.open(tmp_path / "page.html")
        assert page.run("new Promise(done => setTimeout(() => done(window.ran), 300))") == 1


def test_the_policy_stops_a_script_that_would_slip_through(chromium, tmp_path, plain):
    """Were a text not escaped, the policy would still not let it run: nothing is allowed inline."""
    with browser(chromium, tmp_path / "profile") as page:
        page.open(Address(f"{plain[0]}/results"))
        page.run("(() => { const e = document.createElement('img'); e.setAttribute('onerror', 'window.ran=1'); e.src = '/static/none.png';"
                 " document.body.append(e); const s = document.createElement('script'); s.textContent = 'window.ran=1';"
                 " document.body.append(s); })()")
        assert page.run("new Promise(done => setTimeout(() => done(window.ran === undefined), 300))")
        assert any("Content Security Policy" in text for text in page.said)


@pytest.mark.parametrize("width, scheme", [(1300, "light"), (390, "dark"), (320, "light")])
def test_pages_fit_their_window_and_are_readable(chromium, tmp_path, plain, width, scheme):
    """No page is wider than its window; every text stands out from what lies behind it by 4.5 to 1, as WCAG 2.2 AA asks."""
    address, made = plain
    with browser(chromium, tmp_path / "profile") as page:
        for path in [*EVERY_PAGE, f"/results/{made.results['delta']}", f"/results/{made.results['flagged']}", "/compare?result=2&result=4"]:
            page.open(Address(address + path), width=width, prefers_color_scheme=scheme)
            assert page.run("document.documentElement.scrollWidth <= innerWidth"), path
            assert page.run(FAINT) == [], path


def test_no_table_is_cut_at_a_common_width_of_a_window(chromium, tmp_path, plain):
    address, made = plain
    cut = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.getAttribute('aria-label'))"
    with browser(chromium, tmp_path / "profile") as page:
        for path in [*EVERY_PAGE, *(f"/results/{number}" for number in made.results.values()), "/compare?result=1&result=2"]:
            assert page.open(Address(address + path), width=1440).run(cut) == [], path
        assert page.open(Address(f"{address}/results"), width=700).run(cut) == ["Results"], "the control: there is no room"


# Texts whose contrast with the nearest painted background is below 4.5.
FAINT = """(() => {
  const channels = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.slice(0, 3).map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = channels(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || !e.checkVisibility() || e.disabled) continue;
    const a = light(channels(getComputedStyle(e).color)), b = light(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push([e.tagName, e.textContent.trim().slice(0, 40), ratio]);
  }
  return found;
})()"""


def test_every_control_has_a_name_and_every_table_headings(chromium, tmp_path, plain):
    address, made = plain
    with browser(chromium, tmp_path / "profile") as page:
        for path in [*EVERY_PAGE, f"/results/{made.results['delta']}"]:
            page.open(Address(address + path))
            assert page.run("[...document.querySelectorAll('select, input:not([type=hidden]):not([aria-hidden]), textarea')]"
                            ".filter(e => !e.labels.length && !e.ariaLabel).map(e => e.outerHTML)") == [], path
            assert page.run("[...document.querySelectorAll('table')].filter(t => !t.querySelector('th[scope]')).length") == 0, path
            assert page.run("[...document.querySelectorAll('a, button')].every(e => e.textContent.trim() || e.ariaLabel)"), path


def test_the_skip_link_comes_first_and_leads_to_the_content(chromium, tmp_path, plain):
    with browser(chromium, tmp_path / "profile") as page:
        page.open(Address(f"{plain[0]}/leaderboard"))
        tab(page)
        assert page.run("document.activeElement.textContent") == "Skip to the content"
        assert page.run("document.activeElement.getBoundingClientRect().left >= 0")
        assert page.run("(document.activeElement.click(), document.activeElement.id)") == "main"


def tab(page):
    for kind in ("rawKeyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)


def test_a_heading_sorts_its_table_both_ways_and_says_so(chromium, tmp_path, plain):
    """Peaks by hand: 1 (flagged), 5, 5, 5.25, 6.5 and 8 GiB."""
    peaks = "[...document.querySelectorAll('tbody tr')].map(r => parseFloat(r.cells[7].textContent))"
    click = ("(() => { const h = [...document.querySelectorAll('th')].find(h => h.textContent === 'peak memory');"
             " h.querySelector('button').click(); return h.ariaSort; })()")
    with browser(chromium, tmp_path / "profile") as page:
        page.open(Address(f"{plain[0]}/results"))
        assert page.run(peaks) != [1, 5, 5, 5.25, 6.5, 8]
        assert (page.run(click), page.run(peaks)) == ("ascending", [1, 5, 5, 5.25, 6.5, 8])
        assert (page.run(click), page.run(peaks)) == ("descending", [8, 6.5, 5.25, 5, 5, 1])


def test_two_results_are_picked_and_compared(chromium, tmp_path, plain):
    address, made = plain
    pick = "(n => document.querySelector(`input[name=result][value='${n}']`).click())"
    with browser(chromium, tmp_path / "profile") as page:
        page.open(Address(f"{address}/results"))
        assert page.run("document.querySelector('form.pick-two button[type=submit]').disabled")
        page.run(f"{pick}({made.results['delta']})")
        assert page.run("document.querySelector('form.pick-two [role=status]').textContent") == "1 of 2 results picked"
        page.run(f"{pick}({made.results['again']})")
        assert not page.run("document.querySelector('form.pick-two button[type=submit]').disabled")


def test_without_javascript_everything_works(chromium, tmp_path, plain):
    with browser(chromium, tmp_path / "profile") as page:
        page.call("Emulation.setScriptExecutionDisabled", value=True)
        page.open(Address(f"{plain[0]}/results"))
        page.call("Emulation.setScriptExecutionDisabled", value=False)
        assert page.run("!document.querySelector('form.pick-two button[type=submit]').disabled && !document.querySelector('button.sort')")


def submit(page, form):
    """Send a form as its button does."""
    page.leave(f"document.querySelector({form!r} + ' button[type=submit]').click()")


def write(page, **fields):
    for name, text in fields.items():
        page.run(f"document.querySelector('[name={name}]').value = {json.dumps(text)}")


RULES = {"title": "Least memory", "name": "least", "model": "resnet50", "device": "NVIDIA H200", "budget": "60%", "seeds": "0, 1",
         "opens_at": "2026-01-01T00:00", "closes_at": "2126-01-01T00:00"}


def test_an_organiser_logs_in_announces_and_logs_out(chromium, tmp_path, plain):
    """Through the forms themselves: the policy, the cookies and the CSRF tokens let a person do what a person may."""
    address, made = plain
    with browser(chromium, tmp_path / "profile") as page:
        page.open(Address(f"{address}/login"))
        write(page, token=made.tokens["ada"])
        submit(page, "form.entry")
        assert page.run("location.pathname") == "/competitions" and page.run("document.cookie") == ""
        page.open(Address(f"{address}/competitions/new"))
        write(page, **RULES)
        submit(page, "form.entry")
        assert page.run("location.pathname") == "/competitions/least"
        assert page.run("document.querySelector('h1').textContent") == "Least memory"
        write(page, result=str(made.results["delta"]))
        submit(page, "form.entry")
        assert page.run("document.querySelector('tbody th').textContent.trim()").startswith("delta")
        submit(page, "header form")
        assert page.run("[...document.querySelectorAll('header a')].some(a => a.textContent === 'Log in')")
        assert page.said == []


def test_what_an_organiser_writes_runs_nowhere_either(chromium, tmp_path, hostile):
    """Hostile rules that are refused come back in the form as they were written; those that are taken stand on the pages as text."""
    address, made = hostile
    with browser(chromium, tmp_path / "profile") as page:
        page.open(Address(f"{address}/login"))
        write(page, token=made.tokens["ada"])
        submit(page, "form.entry")
        for name, text in enumerate(HOSTILE):
            page.open(Address(f"{address}/competitions/new"))
            write(page, **RULES | {"title": text, "model": text, "device": text, "budget": text, "description": text, "name": "Wrong Name"})
            submit(page, "form.entry")
            kept = page.run("['title', 'model', 'description'].map(name => document.getElementById('field-' + name).value)")
            assert kept == [text] * 3
            assert "budget" in page.run("document.body.textContent") and page.run("location.pathname") == "/competitions"
            write(page, name=f"hostile-{name}", budget=RULES["budget"])  # which has to be one that a result can have
            submit(page, "form.entry")
            assert page.run("location.pathname") == f"/competitions/hostile-{name}"
            assert page.run("document.querySelector('h1').textContent") == text and page.run("window.ran === undefined")
        page.open(Address(f"{address}/competitions"))
        assert page.run("window.ran === undefined && document.querySelectorAll('main li').length") >= len(HOSTILE)
        assert [text for text in page.said if "422" not in text] == []
