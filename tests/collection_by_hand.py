"""A small collection of results whose rows are written by hand, so that the numbers on the pages can be reckoned without the queries.

    ada   bundle-a  resnet50 on an H200, batch 32: eager 8 GiB; delta 60 % 5 GiB, +24 %; delta 80 % 6.5 GiB, +6 %    checked, one reproduced
    bob   bundle-b  the same cell of delta 60 %: 5.0 GiB, +26 %                                                    reproduced
    eve   bundle-c  delta 60 %: 1 GiB, -50 %: too good                                                             flagged
    ada   bundle-d  resnet50 on simulated v100-32gb, delta 60 %: 5.25 GiB, +31 %                                   checked, simulated
    bob   bundle-e  withdrawn
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from vramlab.crowd.server import accounts
from vramlab.crowd.server.audit import note
from vramlab.crowd.server.tables import (
    Account, Agreement, Bundle, Competition, Entry, Mark, Result, Standing, Verdict,
)

GIB = 2**30
DAY = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
H200 = "NVIDIA H200"
V100 = "simulated v100-32gb"
WORKLOAD = "classes=1000 image_size=224, sgd, float32"


@dataclass
class Made:
    """What the tests ask for by name."""

    results: dict[str, int]
    tokens: dict[str, str]


def fill(session: Session, shown: Any = str) -> Made:
    """Write the collection. `shown` wraps every free text: a test can put something hostile around each."""
    people = {name: session.scalar(select(Account).where(Account.name == name)) or accounts.create_account(session, name, actor="test")
              for name in ("ada", "bob", "eve")}
    for account in people.values():
        account.display_name, account.affiliation = shown(account.name.title()), shown("Institute")
    tokens = {name: accounts.create_token(session, name, scopes, actor="test")[0]
              for name, scopes in (("ada", ("submit", "organise")), ("bob", ("submit",)), ("eve", ("submit",)))}
    made = Made({}, tokens)
    a = bundle(session, people["ada"], "a", "checked", shown)
    made.results["eager"] = result(session, a, "eager", "", 8.0, 0.0, shown).id
    first = result(session, a, "delta", "60%", 5.0, 0.24, shown, state="reproduced", reproduced_count=1, machine="m1", low=0.20, high=0.28)
    made.results |= {"delta": first.id, "delta80": result(session, a, "delta", "80%", 6.5, 0.06, shown).id}
    b = bundle(session, people["bob"], "b", "checked", shown)
    again = result(session, b, "delta", "60%", 5.0, 0.26, shown, state="reproduced", reproduced_count=1, machine="m2")
    c = bundle(session, people["eve"], "c", "flagged", shown)
    made.results |= {"again": again.id, "flagged": result(session, c, "delta", "60%", 1.0, -0.5, shown, state="flagged", machine="m3").id}
    d = bundle(session, people["ada"], "d", "checked", shown)
    made.results["simulated"] = result(session, d, "delta", "60%", 5.25, 0.31, shown, is_simulated=True).id
    e = bundle(session, people["bob"], "e", "withdrawn", shown)
    made.results["withdrawn"] = result(session, e, "delta", "60%", 4.0, 0.1, shown, state="withdrawn").id
    for one, other in ((first, again), (again, first)):
        session.add(Agreement(result_id=one.id, other_id=other.id, account_id=other.account_id, kind="reproduced",
                              differences={"peak_bytes": 0.0, "overhead": 0.02}))
    _standings(session, made.results, shown)
    _verdicts(session, {"a": a, "b": b, "c": c, "d": d}, shown)
    session.add(Mark(bundle_id=a.id, body={"bundle": a.name, "note": shown("checked")}, key_id="k" * 16, signature=shown("sig")))
    note(session, actor="ada", action="bundle received", subject=f"bundle {a.name}", detail={"note": shown("first")})
    note(session, actor="server", action="bundle checked", subject=f"bundle {a.name}")
    _competition(session, people, made.results, shown)
    session.flush()
    return made


def bundle(session: Session, account: Account, letter: str, state: str, shown: Any) -> Bundle:
    """One bundle; its name is 32 times the letter, hex digits as in real ones."""
    made = Bundle(name=letter * 32, archive_sha256=letter * 64, archive_bytes=1000, manifest_sha256=letter * 64,
                  account=account, account_id=account.id, key_id="f" * 16, workflow=shown("resnet50-delta"), run_id="r1",
                  harness_version="0.1.0", state=state,
                  submitted_at=DAY + timedelta(hours=ord(letter)), checked_at=None if state == "received" else DAY + timedelta(hours=200),
                  state_reason=shown("a reason") if state in ("flagged", "withdrawn") else "",
                  findings=[{"rule": "telemetry-spans", "severity": "warning", "where": shown("cells/1/telemetry.csv.gz"),
                             "message": shown("it ends early")}] if letter in "ac" else [])
    session.add(made)
    session.flush()
    return made


def result(session: Session, owner: Bundle, method: str, budget: str, peak: float, overhead: float, shown: Any, *, state: str = "checked",
           is_simulated: bool = False, machine: str = "m1", reproduced_count: int = 0, low: float | None = None, high: float | None = None,
           ) -> Result:
    """One result of resnet50 at batch 32; `peak` in GiB."""
    number = len(owner.results) + 1 if "results" in owner.__dict__ else 1
    made = Result(bundle_id=owner.id, account=owner.account, account_id=owner.account_id,
                  cell_id=f"{owner.name}-{method}-{budget}-{number}",
                  record_sha256="0" * 64, submitted_at=owner.submitted_at, state=state, reproduced_count=reproduced_count,
                  workflow=owner.workflow, experiment=shown("memory"), kind="step", model=shown("resnet50"),
                  workload=shown(WORKLOAD), method=shown(method),
                  method_source_sha256="", harness_version="0.1.0", device=shown(V100 if is_simulated else H200),
                  target="sim:v100-32gb" if is_simulated else "cuda:0", is_cpu=False, is_simulated=is_simulated, batch_size=32,
                  budget=shown(budget) if budget else "", budget_bytes=None, seed=0, options={"action": shown("director")}, outcome="ok",
                  reason="", truth="not_run" if is_simulated else "exact", peak_bytes=int(peak * GIB), eager_peak_bytes=8 * GIB,
                  memory_saved=1 - peak / 8, step_seconds=0.1 * (1 + overhead), overhead=overhead, overhead_low=low, overhead_high=high,
                  samples=20, largest=None, recomputes=134, moved_bytes=GIB, machine_hash=machine, telemetry_sha256="", samples_sha256="",
                  comparison_key=f"{method}{budget}{is_simulated}", standing_key=f"{method}{budget}{is_simulated}")
    session.add(made)
    session.flush()
    return made


def _standings(session: Session, ids: dict[str, int], shown: Any) -> None:
    """By hand: what a group's numbers come to."""
    def add(method: str, budget: str, n: int, spreads: dict[str, tuple[float, float, float, float, int]], *, is_verified: bool = True,
            is_simulated: bool = False, accounts: int = 1, machines: int = 1, reproduced: int = 0) -> None:
        metrics = {name: {"best": best, "low": low, "median": mid, "high": high, "n": n, "result": number}
                   for name, (best, low, mid, high, number) in spreads.items()}
        session.add(Standing(standing_key=f"{method}{budget}{is_simulated}", is_verified=is_verified, model=shown("resnet50"),
                             workload=shown(WORKLOAD), device=shown(V100 if is_simulated else H200), is_cpu=False,
                             is_simulated=is_simulated, method=shown(method), kind="step", batch_size=32,
                             budget=shown(budget) if budget else "", results=n,
                             accounts=accounts, machines=machines, reproduced=reproduced, metrics=metrics))

    def memory(gib: float, number: int) -> dict[str, tuple[float, float, float, float, int]]:
        saved = 1 - gib / 8
        return {"peak_bytes": (gib * GIB,) * 4 + (number,), "memory_saved": (saved,) * 4 + (number,)}

    def time(best: float, median: float, high: float, number: int) -> dict[str, tuple[float, float, float, float, int]]:
        return {"overhead": (best, best, median, high, number)}

    add("eager", "", 1, memory(8, ids["eager"]) | time(0, 0, 0, ids["eager"]))
    add("delta", "60%", 2, memory(5, ids["delta"]) | time(0.24, 0.25, 0.26, ids["delta"]), accounts=2, machines=2, reproduced=2)
    add("delta", "80%", 1, memory(6.5, ids["delta80"]) | time(0.06, 0.06, 0.06, ids["delta80"]))
    add("delta", "60%", 1, memory(1, ids["flagged"]) | time(-0.5, -0.5, -0.5, ids["flagged"]), is_verified=False)
    add("delta", "60%", 1, memory(5.25, ids["simulated"]) | time(0.31, 0.31, 0.31, ids["simulated"]), is_simulated=True)


def _verdicts(session: Session, bundles: dict[str, Bundle], shown: Any) -> None:
    """delta-mem-save: ada and bob measured it reproduced, eve (flagged) too; ada's simulation says partly."""
    for letter, verdict, is_simulated, obtained in (("a", "reproduced", False, "37.5 % saved"), ("b", "reproduced", False, "37.4 % saved"),
                                                    ("c", "reproduced", False, "87.5 % saved"), ("d", "partly", True, "34.4 % saved")):
        owner = bundles[letter]
        session.add(Verdict(bundle_id=owner.id, account_id=owner.account_id, claim="delta-mem-save", experiment="memory",
                            rule="memory_saved_percent", verdict=verdict, obtained=shown(obtained),
                            is_simulated=is_simulated, state=owner.state))


def _competition(session: Session, people: dict[str, Account], ids: dict[str, int], shown: Any) -> None:
    """Smallest overhead of resnet50 in 60 %: ada 24 %, bob 26 %, eve flagged."""
    rules = Competition(name="r50-60", title=shown("ResNet-50 in 60 %"), description=shown("Fast in little memory."),
                        organiser_id=people["ada"].id, model=shown("resnet50"), workload=shown(WORKLOAD), device=shown(H200),
                        budget=shown("60%"), batch_size=32,
                        seeds=[0], metric="overhead", opens_at=DAY - timedelta(days=10), closes_at=DAY + timedelta(days=36500))
    session.add(rules)
    session.flush()
    for key, name in (("again", "bob"), ("delta", "ada"), ("flagged", "eve")):
        session.add(Entry(competition_id=rules.id, result_id=ids[key], account_id=people[name].id, entered_at=DAY))
