"""Submitting and what becomes of it, on both databases: states, who reproduces whom, tombstones, marks, leaderboard, competitions."""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta

import pytest
from crowd_made import headers_of, measured, packed, served
from genuine import genuine_bundle, genuine_run
from sqlalchemy import select

from vramlab.crowd import archive, check, pack_run
from vramlab.crowd.server.audit import broken_links
from vramlab.crowd.server.rankings import competition
from vramlab.crowd.server.standings import refresh_all
from vramlab.crowd.server.tables import Audit, Bundle, Result, Standing, now
from vramlab.crowd.signing import is_signed, make_key
from vramlab.record import RunRecord

BOTH = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]
V100, A100 = "Tesla V100-SXM2-32GB", "NVIDIA A100-SXM4-40GB"


@pytest.fixture(params=BOTH)
def server(request, tmp_path):
    url = request.getfixturevalue("postgres").fresh() if request.param == "postgresql" else None
    with served(tmp_path, url) as made:
        yield made


@pytest.fixture
def lite(tmp_path):
    with served(tmp_path) as made:
        yield made


def states(server, bundle: str) -> list[tuple[str, int, int]]:
    return [(r["state"], r["reproduced_count"], r["repeated_count"]) for r in server.get(f"bundles/{bundle}")["results"]]


def standings(server) -> dict:
    with server.database.read() as session:
        return {(s.standing_key, s.is_verified): (s.results, s.accounts, s.machines, s.reproduced, s.metrics)
                for s in session.scalars(select(Standing))}


def check_standings(server) -> None:
    """The groups that were kept up are those that come from nothing."""
    kept = standings(server)
    with server.database.write() as session:
        refresh_all(session)
    assert kept == standings(server)


def test_a_bundle_is_taken_in_once_and_comes_back_as_it_went(server):
    name, body = packed(server.folder, [measured(1, gpu=V100)], key=server.keys["ada"])
    first, again = server.post("ada", body), server.post("ada", body)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json() == {"bundle": name, "state": "checked", "findings": [],
                                            "url": f"http://testserver/bundles/{name}"}
    with server.database.read() as session:
        assert len(session.scalars(select(Bundle)).all()) == len(session.scalars(select(Result)).all()) == 1
    fetched = server.web.get(f"/api/v1/bundles/{name}/archive")
    assert fetched.content == body and fetched.headers["Digest"] == headers_of(body, "")["Digest"]
    assert [p.read_bytes() for p in (server.settings.data_dir / "bundles").rglob("*.gz")] == [body]
    assert list((server.settings.data_dir / "incoming").iterdir()) == []


def test_the_same_content_signed_anew_is_the_same_bundle(server):
    name, body = packed(server.folder, [measured(1)], key=server.keys["ada"])
    other, again = packed(server.folder / "again", [measured(1)], key=make_key())
    assert name == other and body != again
    assert server.post("ada", body).status_code == 201 and server.post("ada", again).status_code == 200
    assert server.post("bob", again).status_code == 409, "nobody submits what is another's"


def test_a_result_has_what_its_record_says(server):
    server.submit("ada", measured(1, host="m", gpu=V100, peak_mib=400, ratio=1.25))
    row, = server.get("results")["results"]
    wanted = {"model": "resnet50", "workload": "classes=1000 image_size=64, sgd, float32", "method": "delta", "device": V100,
              "is_cpu": False, "is_simulated": False, "batch_size": 16, "budget": "60%", "peak_bytes": 400 * 2**20,
              "eager_peak_bytes": 1000 * 2**20, "memory_saved": 0.6, "truth": "exact", "outcome": "ok", "seed": 0, "state": "checked",
              "account": "ada", "workflow": "hand-made", "samples": 5, "machine_hash": hashlib.sha256(b"m").hexdigest()[:16]}
    assert {name: row[name] for name in wanted} == wanted
    assert row["overhead"] == pytest.approx(0.25) and row["step_seconds"] == pytest.approx(1.25, rel=1e-4)


def test_an_account_on_another_machine_with_the_same_gpu_reproduces(server):
    ours = server.submit("ada", measured(1, host="one", gpu=V100))["bundle"]
    assert states(server, ours) == [("checked", 0, 0)]
    theirs = server.submit("bob", measured(2, host="two", gpu=V100, peak_mib=501, ratio=1.35))["bundle"]
    assert states(server, ours) == states(server, theirs) == [("reproduced", 1, 0)]
    server.submit("bob", measured(3, host="three", gpu=V100))
    assert states(server, ours) == [("reproduced", 1, 0)], "an account counts once, however many machines it has"
    server.submit("chris", measured(4, host="four", gpu=V100))
    assert states(server, ours) == [("reproduced", 2, 0)]
    result = server.get("results")["results"][0]["id"]
    agreements = server.get(f"results/{result}")["agreements"]
    assert [(a["kind"], a["other"]["account"]) for a in agreements] == [("reproduced", "bob"), ("reproduced", "chris")]
    assert agreements[0]["differences"]["peak_bytes"] == pytest.approx(1 / 500)
    check_standings(server)


@pytest.mark.parametrize("why, second", [
    ("another machine is another machine", {"host": "one", "gpu": V100}),
    ("another model of GPU", {"host": "two", "gpu": A100}),
    ("a processor is no GPU", {"host": "two"}),
    ("another batch", {"host": "two", "gpu": V100, "batch_size": 32}),
    ("another budget", {"host": "two", "gpu": V100, "budget": "50%"}),
    ("another option of the method", {"host": "two", "gpu": V100, "options": {"action": "x"}}),
    ("another source of the method", {"host": "two", "gpu": V100, "sources": {"method": "f" * 64, "model": "b" * 64}}),
    ("a peak beyond the tolerance", {"host": "two", "gpu": V100, "peak_mib": 502.6}),
    ("a ratio beyond the tolerance", {"host": "two", "gpu": V100, "ratio": 1.45}),
])
def test_what_does_not_reproduce(lite, why, second):
    ours = lite.submit("ada", measured(1, host="one", gpu=V100))["bundle"]
    lite.submit("bob", measured(2, **second))
    assert states(lite, ours)[0][1] == 0, why


def test_the_tolerance_is_the_declared_one(lite):
    """Inside by the same step that is outside above: half a percent of the larger peak, a tenth of the larger ratio."""
    tolerance = lite.get("rules")["tolerance"]
    assert tolerance == {"peak_share": 0.005, "peak_bytes": 2**20, "ratio_share": 0.1, "largest_share": 0.02}
    ours = lite.submit("ada", measured(1, host="one", gpu=V100))["bundle"]
    lite.submit("bob", measured(2, host="two", gpu=V100, peak_mib=502.4, ratio=1.43))
    assert states(lite, ours) == [("reproduced", 1, 0)]


def test_measuring_otherwise_is_the_same_cell(lite):
    ours = lite.submit("ada", measured(1, host="one", gpu=V100))["bundle"]
    lite.submit("bob", measured(2, host="two", gpu=V100, measure={"steps": 99}, target="cuda:3"))
    assert states(lite, ours) == [("reproduced", 1, 0)]


def test_the_same_owner_or_machine_again_only_repeats(server):
    ours = server.submit("ada", measured(1, host="one", gpu=V100))["bundle"]
    server.submit("ada", measured(2, host="two", gpu=V100))
    assert states(server, ours) == [("repeated", 0, 1)], "the owner on another machine"
    server.submit("bob", measured(3, host="one", gpu=V100))
    assert states(server, ours) == [("repeated", 0, 2)], "another account on the same machine"
    check_standings(server)


def test_without_telemetry_of_its_own_nothing_is_reproduced(lite, tmp_path):
    from dataclasses import replace

    from hand_made import write_run

    ours = lite.submit("ada", measured(1, host="one", gpu=V100))["bundle"]
    bundle = pack_run(write_run(tmp_path / "bare", [replace(measured(2, host="two", gpu=V100), files={})]), key=lite.keys["bob"])
    bundle.write(tmp_path / "bare-bundle")
    assert lite.post("bob", archive.pack(bundle.place(tmp_path / "bare-bundle"))).status_code == 201
    assert states(lite, ours) == [("checked", 0, 0)]


def test_who_was_copied_can_send_the_same_measurement_again(lite):
    """In a larger bundle, say. The copy is flagged, its owner is not, and the copier is still not the owner."""
    lite.submit("ada", measured(1, host="one", gpu=V100))
    assert lite.submit("bob", measured(1, host="two", gpu=V100))["state"] == "flagged"
    assert lite.submit("ada", measured(1, host="one", gpu=V100), measured(2, host="one", gpu=V100, budget="50%"))["state"] == "checked"
    assert lite.submit("bob", measured(1, host="two", gpu=V100), measured(3, host="two", gpu=V100, budget="40%"))["state"] == "flagged"


def test_copied_telemetry_and_copied_steps_are_flagged(server):
    ours = server.submit("ada", measured(1, host="one", gpu=V100))["bundle"]
    answer = server.submit("bob", measured(1, host="two", gpu=V100))
    assert answer["state"] == "flagged" and [f["rule"] for f in answer["findings"]] == ["samples-copied"]
    server.made = 0  # the next bundle has the telemetry of the first
    answer = server.submit("chris", measured(9, host="three", gpu=V100))
    assert answer["state"] == "flagged" and [f["rule"] for f in answer["findings"]] == ["telemetry-copied"]
    assert states(server, ours) == [("checked", 0, 0)]
    assert len(server.get("results")["results"]) == 1, "unverified ones are left out"
    assert len(server.get("results", include_unverified=True)["results"]) == 3
    check_standings(server)


def test_a_withdrawn_bundle_leaves_a_tombstone_and_takes_its_word_back(server):
    ours = server.submit("ada", measured(1, host="one", gpu=V100))["bundle"]
    theirs = server.submit("bob", measured(2, host="two", gpu=V100))["bundle"]
    assert server.say("ada", f"bundles/{theirs}/withdraw", reason="mine now").status_code == 403
    assert server.say("bob", f"bundles/{theirs}/withdraw", reason="a wrong driver").status_code == 200
    assert states(server, ours) == [("checked", 0, 0)] and states(server, theirs) == [("withdrawn", 0, 0)]
    gone = server.get(f"bundles/{theirs}")
    assert (gone["state"], gone["state_reason"], gone["account"]) == ("withdrawn", "a wrong driver", "bob")
    assert server.web.get(f"/api/v1/bundles/{theirs}/archive").status_code == 410
    assert server.say("bob", f"bundles/{theirs}/withdraw", reason="again").status_code == 409
    assert [b["name"] for b in server.get("bundles", include_unverified=True)["bundles"]] == [ours]
    check_standings(server)


def test_a_withdrawn_bundle_does_not_come_back_by_being_sent_again(lite):
    name, body = packed(lite.folder, [measured(1)], key=lite.keys["ada"])
    lite.post("ada", body)
    lite.say("ada", f"bundles/{name}/withdraw", reason="wrong")
    again = lite.post("ada", body)
    assert (again.status_code, again.json()["state"]) == (200, "withdrawn") and lite.get("results")["results"] == []


def test_another_result_of_the_account_stands_in_for_a_withdrawn_one(lite):
    ours = lite.submit("ada", measured(1, host="one", gpu=V100))["bundle"]
    first = lite.submit("bob", measured(2, host="two", gpu=V100))["bundle"]
    lite.submit("bob", measured(3, host="three", gpu=V100))
    lite.say("bob", f"bundles/{first}/withdraw", reason="wrong")
    assert states(lite, ours) == [("reproduced", 1, 0)]


def test_a_newer_bundle_supersedes_the_older_one_of_the_same_account(server):
    old = server.submit("ada", measured(1, peak_mib=500))["bundle"]
    new = server.submit("ada", measured(2, peak_mib=450), supersedes=old)["bundle"]
    gone = server.get(f"bundles/{old}")
    assert (gone["state"], gone["superseded_by"], states(server, old)[0][0]) == ("superseded", new, "superseded")
    assert server.web.get(f"/api/v1/bundles/{old}/archive").status_code == 410
    assert [r["peak_bytes"] for r in server.get("results")["results"]] == [450 * 2**20]
    other = server.submit("bob", measured(3, peak_mib=300), supersedes=new)["bundle"]
    assert server.get(f"bundles/{new}")["state"] == "checked" and server.get(f"bundles/{other}")["state"] == "checked"
    check_standings(server)


def test_a_run_that_grew_counts_each_record_once(lite, tmp_path):
    from crowd_made import run_of

    records = [measured(1, gpu=V100), measured(2, gpu=V100, budget="50%")]
    for count in (1, 2):
        bundle = pack_run(run_of(tmp_path / f"grown-{count}" / "run", records[:count]), key=lite.keys["ada"])
        bundle.write(tmp_path / "grown")
        assert lite.post("ada", archive.pack(bundle.place(tmp_path / "grown"))).status_code == 201
    assert sorted(r["budget"] for r in lite.get("results")["results"]) == ["50%", "60%"]
    check_standings(lite)


def test_an_organiser_flags_and_clears(server):
    ours = server.submit("ada", measured(1, host="one", gpu=V100))["bundle"]
    theirs = server.submit("bob", measured(2, host="two", gpu=V100))["bundle"]
    assert server.say("bob", f"bundles/{ours}/flag", reason="envy").status_code == 403
    assert server.say("olga", f"bundles/{ours}/flag", reason="odd clock").json()["state"] == "flagged"
    assert states(server, ours) == [("flagged", 0, 0)] and states(server, theirs) == [("checked", 0, 0)]
    board = server.get("leaderboard", model="resnet50", device=V100, metric="peak_bytes", include_unverified=True)["rows"]
    assert [(row["is_verified"], row["results"]) for row in board] == [(True, 1), (False, 1)]
    assert server.say("olga", f"bundles/{ours}/clear", reason="explained").json()["state"] == "checked"
    assert states(server, ours) == states(server, theirs) == [("reproduced", 1, 0)]
    check_standings(server)


def test_a_doubt_is_not_cleared_by_sending_the_same_again(lite, tmp_path):
    """Grown by a cell, after a bundle that supersedes the flagged one, after it was withdrawn; nor by an organiser in their own cause."""
    from crowd_made import run_of

    def send(name: str, *records, number: int = 1, supersedes: str | None = None) -> dict:
        """`number` is the telemetry's; its first cell is the doubted one's own where it is 1."""
        bundle = pack_run(run_of(tmp_path / name / "run", records, number), key=lite.keys["ada"], supersedes=supersedes)
        bundle.write(tmp_path / name)
        return lite.post("ada", archive.pack(bundle.place(tmp_path / name))).json()

    doubted, others = measured(1, gpu=V100), [measured(n, gpu=V100, budget=f"{n}%") for n in (2, 3, 4, 5)]
    first = send("first", doubted)
    assert first["state"] == "checked"
    lite.say("olga", f"bundles/{first['bundle']}/flag", reason="odd")
    grown = send("grown", doubted, others[0])
    assert (grown["state"], [f["rule"] for f in grown["findings"]]) == ("flagged", ["doubted-before"])
    assert send("corrected", others[1], number=2, supersedes=first["bundle"])["state"] == "checked"
    assert lite.get(f"bundles/{first['bundle']}")["state"] == "superseded"
    lite.say("ada", f"bundles/{grown['bundle']}/withdraw", reason="another way")
    assert send("again", doubted, others[2])["state"] == "flagged"
    assert "flagged" not in {r["state"] for r in lite.get("results")["results"]} and len(lite.get("results")["results"]) == 1
    assert send("another", others[3], number=3)["state"] == "checked", "a record that nobody doubted"


def test_nobody_takes_back_a_flag_of_their_own_bundle(lite):
    lite.account("chair", "submit", "organise")
    lite.account("admin", "submit", "admin")
    for account, status in (("chair", 403), ("admin", 200)):
        own = lite.submit(account, measured(lite.made + 1, host=account, gpu=V100))["bundle"]
        lite.say("olga", f"bundles/{own}/flag", reason="odd")
        assert lite.say(account, f"bundles/{own}/clear", reason="mine is fine").status_code == status
        assert lite.say("olga", f"bundles/{own}/clear", reason="explained").status_code == (200 if status == 403 else 409)


@pytest.mark.parametrize("change, state", [
    ({"samples": 1.0}, "flagged"), ({"samples": 1.0 + 1e-9}, "flagged"), ({"samples": 0.5}, "flagged"), ({"telemetry": 1}, "flagged"),
    ({}, "checked"),
])
def test_a_copy_that_was_changed_a_little_is_a_copy(lite, tmp_path, change, state):
    """Times that were stretched, telemetry that was packed anew, all of it signed by the copyist's own key."""
    import gzip
    from dataclasses import replace
    from random import Random

    def send(account: str, seed: int, factor: float, packing: int, telemetry: float) -> dict:
        chance = Random(seed)
        block = {"step_seconds": [factor * (1.3 + 0.01 * chance.random()) for _ in range(10)],
                 "baseline_step_seconds": [factor * (1 + 0.01 * chance.random()) for _ in range(10)]}
        record = measured(seed, host=account, gpu=V100)
        record = replace(record, measured={**record.measured, **block})
        from crowd_made import run_of
        run = run_of(tmp_path / account / "run", [record])
        path = run / "cells" / record.cell_id / "telemetry.csv.gz"
        text = gzip.decompress(path.read_bytes()) + f"{telemetry}\n".encode()
        path.write_bytes(gzip.compress(text, packing, mtime=0))
        replace(record, files={path.name: hashlib.sha256(path.read_bytes()).hexdigest()}).save(path.with_name("record.json"))
        bundle = pack_run(run, key=lite.keys[account])
        bundle.write(tmp_path / account)
        return lite.post(account, archive.pack(bundle.place(tmp_path / account))).json()

    assert send("ada", 1, 1.0, 9, 1.0)["state"] == "checked"
    seed, factor = (1, change["samples"]) if "samples" in change else (2, 1.0)
    copied = send("bob", seed, factor, 1, 1.0 if "telemetry" in change else 2.0)
    assert copied["state"] == state, copied
    assert states(lite, lite.get("bundles")["bundles"][0]["name"])[0][1] == (1 if state == "checked" else 0)


def test_with_every_rule_genuine_runs_of_two_machines_reproduce_each_other(tmp_path):
    """The server as it runs: bundles whose every number is derived anew, and one in which one number is another."""
    with served(tmp_path, examine=check) as server:
        bundles = {name: genuine_bundle(tmp_path / "made", seed=seed, key=server.keys[name]) for seed, name in enumerate(("ada", "bob"), 1)}
        answers = [server.post(name, archive.pack(bundle)) for name, bundle in bundles.items()]
        assert [(a.status_code, a.json()["state"]) for a in answers] == [(201, "checked")] * 2, [a.text for a in answers]
        for answer in answers:
            results = server.get(f"bundles/{answer.json()['bundle']}")["results"]
            assert sorted((r["is_simulated"], r["state"], r["reproduced_count"]) for r in results) == [
                (False, "reproduced", 1), (False, "reproduced", 1), (True, "checked", 0), (True, "checked", 0)]
        row, = server.get("claims")
        assert (row["claim"], row["accounts"]) == ("delta-mem-save", 2)
        run = genuine_run(tmp_path / "spoilt", seed=3)
        record = next(path for path in (run / "cells").glob("*/record.json") if RunRecord.load(path).predicted["recomputes"])
        body = json.loads(record.read_text())
        body["predicted"]["step_seconds"] *= 0.99
        record.write_text(json.dumps(body))
        bundle = pack_run(run, key=server.keys["chris"])
        bundle.write(tmp_path / "spoilt-bundle")
        answer = server.post("chris", archive.pack(bundle.place(tmp_path / "spoilt-bundle")))
        assert answer.status_code == 422 and answer.json()["findings"], answer.text
        assert server.get("accounts/chris")["bundles"] == []


# -------------------------------------------------------------------------------------------------------------------- marks


def test_the_mark_is_the_servers_and_says_what_is_so(server):
    ours = server.submit("ada", measured(1, host="one", gpu=V100))["bundle"]
    key = server.get("rules")["key"]
    first = server.get(f"bundles/{ours}/mark")
    assert is_signed(first["body"], first["signature"], key["purpose"]) and first["signature"]["public_key"] == key["public_key"]
    assert first == server.get(f"bundles/{ours}/mark"), "nothing has changed"
    server.submit("bob", measured(2, host="two", gpu=V100))
    second = server.get(f"bundles/{ours}/mark")
    assert [(c["state"], c["reproduced"]) for m in (first, second) for c in m["body"]["results"].values()] == [
        ("checked", 0), ("reproduced", 1)]
    assert second["body"]["bundle"] == ours and is_signed(second["body"], second["signature"], key["purpose"])
    forged = {**second["body"], "state": "reproduced by everybody"}
    assert not is_signed(forged, second["signature"], key["purpose"])
    assert not is_signed(second["body"], make_key().signature_block(second["body"], "bundle 2"), key["purpose"])
    assert key["public_key"] != server.keys["ada"].public_key


def test_the_key_is_the_servers_own_and_stays(tmp_path):
    with served(tmp_path) as server:
        first = server.get("rules")["key"]
        assert {p.stat().st_mode & 0o777 for p in (server.settings.data_dir / "keys").iterdir()} == {0o600}
        assert server.settings.data_dir.stat().st_mode & 0o777 == 0o700, "the database lies in it"
    from crowd_made import TestClient, create_app

    with TestClient(create_app(server.settings)) as again:
        assert again.get("/api/v1/rules").json()["key"] == first


# -------------------------------------------------------------------------------------------------------------------- boards


def test_the_leaderboard_ranks_methods_by_their_best_result(server):
    for number, (account, method, peak, ratio) in enumerate([("ada", "delta", 500, 1.3), ("bob", "delta", 470, 1.5),
                                                              ("ada", "dtr", 480, 1.2), ("ada", "eager", 1000, 1.0)], 1):
        budget = None if method == "eager" else "60%"
        server.submit(account, measured(number, host=account, gpu=V100, method=method, peak_mib=peak, ratio=ratio, budget=budget))
    server.submit("ada", measured(9, gpu=V100, peak_mib=10, batch_size=1))
    server.submit("ada", measured(10, gpu=A100, peak_mib=20))
    server.submit("ada", measured(11, gpu=V100, peak_mib=30, model_options={"image_size": 32}))

    def board(metric: str, **query) -> list[tuple]:
        rows = server.get("leaderboard", model="resnet50", device=V100, metric=metric, **query)["rows"]
        return [(row["rank"], row["method"], row["value"]) for row in rows]

    assert board("peak_bytes") == [(1, "delta", 470 * 2**20), (2, "dtr", 480 * 2**20), (3, "eager", 1000 * 2**20)]
    assert [(rank, method) for rank, method, _ in board("overhead")] == [(1, "eager"), (2, "dtr"), (3, "delta")]
    assert board("peak_bytes", batch_size=1) == [(1, "delta", 10 * 2**20)]
    assert [row[1] for row in board("memory_saved", method="dtr")] == ["dtr"]
    group = server.get("leaderboard", model="resnet50", device=V100, metric="peak_bytes")["rows"][0]
    assert (group["results"], group["accounts"], group["machines"]) == (2, 2, 2)
    assert group["metrics"]["peak_bytes"] == {"best": 470 * 2**20, "low": 470 * 2**20, "median": 485 * 2**20, "high": 500 * 2**20, "n": 2,
                                              "result": group["result"]}
    assert server.get("facets")["boards"][0] == ["resnet50", V100, False, 6]
    assert server.web.get("/api/v1/leaderboard", params={"model": "m", "device": "d", "metric": "id"}).status_code == 422
    check_standings(server)


def test_competitions_rank_what_is_checked_and_fits(server):
    rules = competition_rules(seeds=[0])
    assert server.say("ada", "competitions", **rules).status_code == 403
    assert server.say("olga", "competitions", **rules).status_code == 201
    assert server.say("olga", "competitions", **rules).status_code == 409
    for number, (account, peak) in enumerate([("ada", 500), ("ada", 480), ("bob", 490), ("chris", 470)], 1):
        server.submit(account, measured(number, host=account, gpu=V100, peak_mib=peak))
    flagged = server.submit("chris", measured(7, gpu=A100))
    results = server.get("results")["results"]
    for row in results:
        entered = server.say(row["account"], "competitions/spring/entries", result=row["id"])
        assert entered.status_code == (201 if row["device"] == V100 else 409), entered.text
    assert flagged and server.say("bob", "competitions/spring/entries", result=results[0]["id"]).status_code == 403
    server.say("olga", f"bundles/{results[3]['bundle']}/flag", reason="odd")
    with server.database.read() as session:
        view = competition(session, "spring")
        assert [(c.account, c.value // 2**20) for c in view.ranked] == [("ada", 500), ("bob", 490)][::-1]
        assert sorted(reason for _, reason in view.unranked) == [
            "it is flagged, not checked", f"result {results[0]['id']}, entered before it, holds the place of seed 0"]
    assert [c["account"] for c in server.get("competitions/spring")["ranked"]] == ["bob", "ada"]


def competition_rules(**changes) -> dict:
    return {"name": "spring", "title": "Least memory", "model": "resnet50", "device": V100, "budget": "60%", "batch_size": 16,
            "seeds": [0, 1, 2], "metric": "peak_bytes", "opens_at": (now() - timedelta(hours=1)).isoformat(),
            "closes_at": (now() + timedelta(hours=1)).isoformat()} | changes


class Contest:
    """A server with the competition *spring* over seeds 0, 1 and 2, and submitters who enter what they measured."""

    def __init__(self, server) -> None:
        self.server, self.numbers, self.bundles = server, {}, {}
        assert server.say("olga", "competitions", **competition_rules()).status_code == 201

    def enter(self, account: str, seed: int, peak: float, *, method: str = "delta", name: str = "") -> int:
        record = measured(len(self.numbers) + 1, host=account, gpu=V100, method=method, peak_mib=peak,
                          training={"optimizer": "sgd", "seed": seed, "steps": 3, "lr": 0.1})
        bundle = self.server.submit(account, record)["bundle"]
        number, = (r["id"] for r in self.server.get(f"bundles/{bundle}")["results"])
        assert self.server.say(account, "competitions/spring/entries", result=number).status_code == 201
        self.numbers[name or f"{account} {method} {seed}"], self.bundles[number] = number, bundle
        return number

    def ranked(self) -> list[tuple[str, str, float]]:
        return [(c["account"], c["method"], c["value"] / 2**20) for c in self.view()["ranked"]]

    def incomplete(self) -> list[tuple[str, str, list[int]]]:
        return [(c["account"], c["method"], c["missing"]) for c in self.view()["incomplete"]]

    def reasons(self) -> dict[int, str]:
        return {entry["result"]["id"]: reason for entry, reason in self.view()["unranked"]}

    def view(self) -> dict:
        return self.server.get("competitions/spring")


@pytest.fixture
def contest(server):
    return Contest(server)


@pytest.fixture
def lite_contest(lite):
    return Contest(lite)


def test_an_entry_is_ranked_by_the_median_over_the_whole_seed_set(contest):
    """Ada's one lucky seed is the best of all and helps her nothing; Bob's middle one is below hers."""
    for account, peaks in (("ada", (100, 500, 520)), ("bob", (480, 490, 600)), ("chris", (300, 310))):
        for seed, peak in enumerate(peaks):
            contest.enter(account, seed, peak)
    assert contest.ranked() == [("bob", "delta", 490), ("ada", "delta", 500)]
    assert contest.incomplete() == [("chris", "delta", [2])] and contest.view()["incomplete"][0]["value"] is None
    first = contest.view()["ranked"][0]
    assert [r["seed"] for r in first["results"]] == [0, 1, 2] and (first["low"], first["high"]) == (480 * 2**20, 600 * 2**20)
    contest.enter("chris", 2, 900)
    assert contest.ranked()[0] == ("chris", "delta", 310) and contest.incomplete() == contest.view()["unranked"] == []


def test_seeds_of_two_methods_make_no_entry_together_and_the_better_entry_counts(lite_contest):
    for method, peaks in (("delta", (500, 510, 520)), ("dtr", (100, 110)), ("capuchin", (400, 410, 420))):
        for seed, peak in enumerate(peaks):
            lite_contest.enter("ada", seed, peak, method=method)
    lite_contest.enter("bob", 0, 1, method="delta")
    assert lite_contest.ranked() == [("ada", "capuchin", 410)]
    assert lite_contest.incomplete() == [("ada", "dtr", [2]), ("bob", "delta", [1, 2])]
    assert set(lite_contest.reasons().values()) == {"the account has a better one"} and len(lite_contest.reasons()) == 3


def test_nobody_picks_among_results_of_one_seed(lite_contest):
    """A later and better result of a seed takes no place: not at once, nor when the first is withdrawn. What is entered then does."""
    for seed in (0, 1, 2):
        lite_contest.enter("ada", seed, 500)
    spare = lite_contest.enter("ada", 1, 100, name="spare")
    first, low = lite_contest.numbers["ada delta 1"], lite_contest.enter("ada", 2, 50, name="low")
    assert lite_contest.ranked() == [("ada", "delta", 500)]
    assert lite_contest.reasons()[spare] == f"result {first}, entered before it, holds the place of seed 1"
    lite_contest.server.say("ada", f"bundles/{lite_contest.bundles[first]}/withdraw", reason="not low enough")
    assert lite_contest.ranked() == [] and lite_contest.incomplete() == [("ada", "delta", [1])]
    assert lite_contest.reasons()[first] == "it is withdrawn, not checked" and set(lite_contest.reasons()) == {first, spare, low}
    lite_contest.enter("ada", 1, 700, name="after")
    assert lite_contest.ranked() == [("ada", "delta", 500)] and lite_contest.view()["ranked"][0]["high"] == 700 * 2**20


def test_a_flagged_seed_makes_an_entry_incomplete_until_it_is_cleared(lite_contest):
    numbers = [lite_contest.enter("ada", seed, 500 + seed) for seed in (0, 1, 2)]
    bundle = lite_contest.bundles[numbers[1]]
    lite_contest.server.say("olga", f"bundles/{bundle}/flag", reason="odd")
    assert lite_contest.ranked() == [] and lite_contest.incomplete() == [("ada", "delta", [1])]
    assert lite_contest.reasons() == {numbers[1]: "it is flagged, not checked"}
    lite_contest.server.say("olga", f"bundles/{bundle}/clear", reason="explained")
    assert lite_contest.ranked() == [("ada", "delta", 501)]


def test_a_run_that_grew_takes_its_entries_along(lite, tmp_path):
    from crowd_made import run_of

    lite.say("olga", "competitions", **competition_rules(seeds=[0]))
    records = [measured(1, gpu=V100), measured(2, gpu=V100, budget="50%")]
    for count in (1, 2):
        bundle = pack_run(run_of(tmp_path / f"grown-{count}" / "run", records[:count]), key=lite.keys["ada"])
        bundle.write(tmp_path / "grown")
        assert lite.post("ada", archive.pack(bundle.place(tmp_path / "grown"))).status_code == 201
        if count == 1:
            number = lite.get("results")["results"][0]["id"]
            assert lite.say("ada", "competitions/spring/entries", result=number).status_code == 201
    now_at = next(r["id"] for r in lite.get("results")["results"] if r["budget"] == "60%")
    ranked, = lite.get("competitions/spring")["ranked"]
    assert now_at != number and [r["id"] for r in ranked["results"]] == [now_at]


def patch(server, account: str, name: str = "spring", **body):
    """PATCH of a competition with the account's token."""
    return server.web.patch(f"/api/v1/competitions/{name}", content=json.dumps(body), headers={
        "Authorization": f"Bearer {server.tokens[account]}", "Content-Type": "application/json"})


def test_a_competition_is_corrected_by_its_organiser_and_what_ranks_stands_from_the_first_entry(contest):
    server = contest.server
    server.account("otto", "organise")
    assert patch(server, "ada", title="Mine").status_code == patch(server, "otto", title="Mine").status_code == 403
    assert patch(server, "olga", "winter", title="None").status_code == 404
    corrected = patch(server, "olga", seeds=[2, 1, 2], batch_size=None, title="Least bytes").json()
    assert (corrected["seeds"], corrected["batch_size"], corrected["title"]) == ([1, 2], None, "Least bytes") and corrected["corrected_at"]
    for wrong in ({"title": ""}, {"title": None}, {"organiser": "ada"}, {"device": "cpu"}, {"closes_at": "2026-01-01T00:00:00"},
                  {"seeds": []}, {"closes_at": "2020-01-01T00:00:00+00:00"}, {"opens_at": "9999-12-31T00:00:00+00:00"}):
        assert patch(server, "olga", **wrong).status_code == 422, wrong
    contest.enter("ada", 1, 500)
    for fixed in ({"seeds": [1]}, {"metric": "overhead"}, {"device": A100}, {"batch_size": 16}, {"budget": ""}, {"model": "x"},
                  {"workload": "x"}):
        answer = patch(server, "olga", title="No", **fixed)
        assert answer.status_code == 409 and next(iter(fixed)).replace("_", " ") in answer.json()["error"], fixed
    assert patch(server, "olga", opens_at=now().isoformat()).status_code == 409, "who has entered would fall out"
    assert patch(server, "olga", description="The same, said better").status_code == 200
    assert patch(server, "root", closes_at=(now() + timedelta(seconds=0.05)).isoformat()).status_code == 200, "an administrator, too"
    while server.get("competitions/spring")["competition"]["closes_at"] > now().isoformat():
        pass
    answer = patch(server, "olga", closes_at=(now() + timedelta(days=1)).isoformat())
    assert answer.status_code == 409 and "open again" in answer.json()["error"]
    with server.database.read() as session:
        rows = session.scalars(select(Audit).where(Audit.action == "competition corrected").order_by(Audit.id)).all()
        assert [sorted(row.detail) for row in rows] == [["batch_size", "seeds", "title"], ["description"], ["closes_at"]]
        assert rows[0].detail["seeds"] == [[0, 1, 2], [1, 2]] and [row.actor for row in rows] == ["olga", "olga", "root"]


def test_a_competition_is_withdrawn_and_leaves_a_tombstone(contest):
    server = contest.server
    for seed in (0, 1, 2):
        contest.enter("ada", seed, 500)
    assert contest.ranked()
    assert server.say("ada", "competitions/spring/withdraw", reason="mine").status_code == 403
    assert server.say("olga", "competitions/spring/withdraw", reason="").status_code == 422
    gone = server.say("olga", "competitions/spring/withdraw", reason="the wrong board").json()
    assert gone["withdrawn_reason"] == "the wrong board" and gone["withdrawn_at"]
    assert contest.ranked() == contest.incomplete() == [] and contest.reasons() == {}
    number = next(iter(contest.numbers.values()))
    answer = server.say("ada", "competitions/spring/entries", result=number)
    assert answer.status_code == 409 and answer.json()["error"] == "the competition is withdrawn"
    assert server.say("olga", "competitions/spring/withdraw", reason="again").status_code == 409
    assert patch(server, "olga", title="x").status_code == 409
    with server.database.read() as session:
        last = session.scalars(select(Audit).order_by(Audit.id.desc()).limit(1)).one()
        assert (last.action, last.actor, last.detail) == ("competition withdrawn", "olga", {"reason": "the wrong board"})
        assert broken_links(session.scalars(select(Audit).order_by(Audit.id))) == []


@pytest.mark.parametrize("seeds", [[], None, [0] * 101, [-1]])
def test_a_competition_has_a_seed_set(lite, seeds):
    rules = {key: value for key, value in competition_rules(seeds=seeds).items() if value is not None}
    assert lite.say("olga", "competitions", **rules).status_code == 422
    assert lite.say("olga", "competitions", **competition_rules(name="new")).status_code == 422, "its page would be the form's"
    assert lite.say("olga", "competitions", **competition_rules(seeds=[2, 0, 2])).json()["seeds"] == [0, 2]


@pytest.mark.parametrize("dates", [{"closes_at": "9999-12-31T23:59:59-12:00"}, {"opens_at": "0001-01-01T00:00:00+14:00"}])
def test_a_competition_lies_in_our_time(lite, dates):
    """In UTC these dates are beyond what a date can be."""
    answer = lite.say("olga", "competitions", **competition_rules(**dates))
    assert answer.status_code == 422 and "century" in answer.json()["error"]


def test_verdicts_count_once_an_account(lite):
    claims = [{"id": "delta-mem-save", "rule": "memory_saved_percent", "experiment": "memory", "method": "delta"}]
    for number, account in enumerate(["ada", "ada", "bob"], 1):
        lite.submit(account, measured(number, host=account, gpu=V100),
                    measured(number + 50, host=account, gpu=V100, method="eager", peak_mib=1000, ratio=1.0, budget=None), claims=claims)
    row, = lite.get("claims")
    assert (row["claim"], row["verdicts"], row["measured"], row["accounts"]) == (
        "delta-mem-save", {"reproduced": 2}, {"reproduced": 2}, 2)


def test_lists_come_a_page_at_a_time(server):
    names = [server.submit("ada", measured(number, budget=f"{number}%"))["bundle"] for number in range(1, 6)]
    seen, after = [], 0
    while after is not None:
        page = server.get("bundles", limit=2, after=after)
        seen += [bundle["name"] for bundle in page["bundles"]]
        after = page["next"]
    assert seen == names
    assert [b["name"] for b in server.get("bundles", workflow="hand-made", account="ada")["bundles"]] == names
    assert server.get("bundles", workflow="another")["bundles"] == server.get("bundles", account="bob")["bundles"] == []


def test_everything_that_was_done_stands_in_the_audit_log(server):
    bundle = server.submit("ada", measured(1))["bundle"]
    server.say("ada", f"bundles/{bundle}/withdraw", reason="wrong")
    with server.database.read() as session:
        rows = session.scalars(select(Audit).order_by(Audit.id)).all()
    assert broken_links(rows) == []
    assert [(r.actor, r.action) for r in rows if r.subject == f"bundle {bundle}"] == [
        ("ada", "bundle received"), ("server", "bundle checked"), ("ada", "bundle withdrawn")]
    assert server.web.get("/api/v1/audit", headers={"Authorization": f"Bearer {server.tokens['ada']}"}).status_code == 403
    told = server.web.get("/api/v1/audit", headers={"Authorization": f"Bearer {server.tokens['root']}"}).json()
    assert [row["id"] for row in told] == list(range(1, len(rows) + 1))
