"""artifact_appendix.md against the workflows and claims themselves, read here by other means."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hand_made import measured_step, search

from vramlab.appendix import APPENDIX_FILE, render_appendix
from vramlab.record import Verdict
from vramlab.report.claims import RULES, PaperClaim, Question, expectation

ROOT = Path(__file__).parent.parent
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "workflows").glob("*.yaml"))
             if path.name != "artifact.yaml"}
PAPERS = {claim["id"]: claim for claim in yaml.safe_load((ROOT / "reports" / "claims.yaml").read_text())["claims"]}
HEADINGS = ["Abstract", "Artifact check-list (meta-information)", "Description", "How to access", "Hardware dependencies",
            "Software dependencies", "Data sets", "Models and methods", "Installation", "Experiment workflow",
            "Evaluation and expected results", "Experiment customization", "Notes", "Methodology"]


@pytest.fixture(scope="module")
def text() -> str:
    return (ROOT / APPENDIX_FILE).read_text()


def rows(text: str, section: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    part = text[text.index(f"## {section}"):]
    lines = re.search(r"(?:^\|.*\n)+", part, re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_file_is_up_to_date(text):
    assert text == render_appendix(ROOT), f"{APPENDIX_FILE} is out of date: python -m vramlab.appendix writes it"


def test_headings_stand_in_the_order_of_the_template(text):
    assert re.findall(r"^#{2,3} A[.0-9]+ (.*)$", text, re.MULTILINE) == HEADINGS


def test_every_claim_of_every_workflow_has_its_command_value_minutes_and_disk(text):
    wanted = [(name, claim) for name, body in WORKFLOWS.items() for claim in body.get("claims", ())]
    found = rows(text, "A.6")
    assert len(found) == len(wanted) > 0
    for (name, claim), row in zip(wanted, found):
        paper = PAPERS[claim["id"]]
        stated = claim.get("value", paper["value"])
        value = stated if isinstance(stated, list) else [stated]
        named = claim["experiment"] if isinstance(claim["experiment"], list) else [claim["experiment"]]
        assert (row[0], row[5]) == (claim["id"], f"`./run workflow {name}.yaml`")
        assert row[4].replace(" and ", ", ").split(", ") == named
        assert paper["metric"] in row[1]
        assert all(f"{v:.10g}" in row[1] for v in value if isinstance(v, int | float) and not isinstance(v, bool))
        expected = [WORKFLOWS[name]["expected"], WORKFLOWS[name].get("when", {}).get("cpu", {}).get("expected", {})]
        assert all(f"{e['minutes']:g}" in re.findall(r"[0-9.]+", row[6]) for e in expected if "minutes" in e)
        assert "MiB" in row[7] or "GiB" in row[7]
        experiment = next(e for e in WORKFLOWS[name]["experiments"] if e["name"] == named[0])
        simulated = experiment.get("targets", WORKFLOWS[name].get("targets", []))
        assert row[3].startswith("simulated") == (bool(simulated) and all(t.startswith("sim:") for t in simulated))


def test_every_claim_that_is_given_up_stands_there_with_its_reason(text):
    given_up = [group for body in WORKFLOWS.values() for group in body.get("untestable", ())]
    assert given_up and all(name in PAPERS for group in given_up for name in group["claims"])
    assert all(f": {group['reason']}." in text and all(name in text for name in group["claims"]) for group in given_up)


def test_every_workflow_has_its_command(text):
    assert [row[0] for row in rows(text, "A.5")] == [f"`./run workflow {name}.yaml`" for name in WORKFLOWS]


@pytest.mark.parametrize(("rule", "value", "tolerance", "edge", "words"), [
    ("memory_saved_percent", [40, 70], 0.1, 36.0, "at least 36.0 %"), ("max_batch_ratio", 2.04, 0.1, 1.836, "1.84 to 2.24 x"),
    ("overhead_percent", 30, 0.2, 24.0, "24.0 to 36.0 %"),
])
def test_what_is_expected_is_what_is_graded(rule, value, tolerance, edge, words):
    """Just inside the words is reproduced, just outside is not: by the rules themselves, on records with that value."""
    claim = PaperClaim(id="x", system="delta", metric="m", value=value, unit="percent")
    assert expectation(rule, claim, tolerance) == words

    def verdict(obtained: float) -> Verdict:
        if rule == "max_batch_ratio":
            records = [search("eager", 10**6, high=10**9), search("delta", round(obtained * 10**6), high=10**9)]
        elif rule == "overhead_percent":
            records = [measured_step("delta", 500, budget="50%", ratio=1 + obtained / 100)]
        else:
            records = [measured_step("eager", 1000), measured_step("delta", 1000 * (1 - obtained / 100), budget="50%")]
        return RULES[rule](Question({}, claim, tolerance, records, lambda record: record.config["method"])).verdict

    assert verdict(edge * 1.001) is Verdict.REPRODUCED and verdict(edge * 0.999) is not Verdict.REPRODUCED


def test_a_rule_and_a_claim_that_do_not_go_together_are_refused():
    words = PaperClaim(id="x", system="s", metric="m", value="comparable", unit="text")
    for rule in ("max_batch_ratio", "no_such_rule"):
        with pytest.raises(ValueError, match="do not go together"):
            expectation(rule, words, 0.1)


def toy_root(tmp_path: Path) -> Path:
    """A copy of what the appendix is made from."""
    for name in ("workflows", "methods", "models", "reports"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("LICENSE", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_a_changed_workflow_makes_another_appendix(text, tmp_path):
    root = toy_root(tmp_path)
    path = root / "workflows" / "resnet50-delta.yaml"
    path.write_text(path.read_text().replace("rule: max_batch_ratio, method: delta, baseline: eager, tolerance: 0.1",
                                             "rule: max_batch_ratio, method: delta, baseline: eager, tolerance: 0.5"))
    changed = render_appendix(root)
    assert changed != text and "1.02 to 3.06 x" in changed


def test_what_the_authors_say_is_read_from_artifact_yaml_and_is_called_their_word(text, tmp_path):
    said = yaml.safe_load((ROOT / "workflows" / "artifact.yaml").read_text())
    fields = {row[0]: row[1] for row in rows(text, "A.2")}
    for field, item in (("Transformations", "AE-4"), ("Run-time state", "AE-10"), ("Data licenses", "AE-20"), ("Archived?", "AE-22")):
        why = said["answers"]["ctuning-ae"][item]["why"].strip().rstrip(".")
        assert f"{why} (the authors' word, for {' and '.join(said['workflows'])})" in fields[field], field
    assert "AE-18" not in said["answers"]["ctuning-ae"] and fields["Publicly available?"] == "to be answered by the authors"
    root = toy_root(tmp_path)
    path = root / "workflows" / "artifact.yaml"
    path.write_text("schema: 1\nanswers: {ctuning-ae: {AE-18: {answer: filled, why: at example.org}}}\n")
    changed = {row[0]: row[1] for row in rows(render_appendix(root), "A.2")}
    assert changed["Publicly available?"] == "at example.org (the authors' word)", "said of every workflow, so of none by name"
    assert changed["Archived?"] == "to be answered by the authors"


def test_a_claim_that_nobody_knows_is_an_error(tmp_path):
    root = toy_root(tmp_path)
    path = root / "workflows" / "resnet50-delta.yaml"
    path.write_text(path.read_text().replace("id: delta-bs-r50", "id: delta-bs-r51"))
    with pytest.raises(ValueError, match="delta-bs-r51"):
        render_appendix(root)


def test_check_says_whether_it_is_up_to_date():
    done = subprocess.run([sys.executable, "-m", "vramlab.appendix", "--check"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"{APPENDIX_FILE} is up to date\n")
