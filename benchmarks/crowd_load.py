"""The server of shared results under load: many submitters at once, kill -9 in the middle, a leaderboard over many results.

    python benchmarks/crowd_load.py [--submitters 64] [--bundles 50] [--kills 20] [--results 100000] [--databases sqlite,postgresql]
                                    [--parts submit,kill,leaderboard]

    submit        all submitters at once, every tenth bundle sent a second time; what is there afterwards is held against what was sent
    kill          some of these bundles into a new server that is killed with SIGKILL at random instants and started again; after each kill
                  everything that was acknowledged has to be there
    leaderboard   seconds of GET /api/v1/leaderboard over HTTP, one client after the other and eight at a time, over random boards

Everything is on this machine's loopback address, in folders that go afterwards. The bundles' records are written by hand, so the server
asks the first round of rules only: every byte, the manifest, the signature. PostgreSQL runs without fsync, SQLite with it.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Iterator

from common import ROOT, keep, kept, machine

sys.path[:0] = [str(ROOT / "tests")]
import httpx  # noqa: E402
from conftest import find_postgres  # noqa: E402
from crowd_made import headers_of  # noqa: E402
from postgres import Postgres  # noqa: E402
from sqlalchemy import insert, select  # noqa: E402
from test_server_faults import WEB, Process, accounts_of, check_collection, make_bundles  # noqa: E402

from vramlab.crowd.server.database import Database  # noqa: E402
from vramlab.crowd.server.rows import standing_key  # noqa: E402
from vramlab.crowd.server.settings import read_settings  # noqa: E402
from vramlab.crowd.server.standings import refresh_all  # noqa: E402
from vramlab.crowd.server.tables import Account, Bundle, Result, State, now  # noqa: E402

SECONDS = 900  # at most, for one part
MODELS, DEVICES, METHODS, BATCHES, BUDGETS = 12, 10, 15, (16, 32, 64), ("", "80%", "60%", "40%")
METRICS = ("memory_saved", "peak_bytes", "overhead", "step_seconds")


def main() -> None:
    options = _options()
    server = Postgres() if "postgresql" in options.databases and find_postgres() else None
    parts = options.parts.split(",")
    try:
        with tempfile.TemporaryDirectory() as folder:
            bundles = make_bundles(Path(folder) / "made", options.submitters, options.bundles) if {"submit", "kill"} & set(parts) else []
            print(f"{len(bundles)} bundles are made", flush=True)
            for kind in options.databases.split(","):
                for part in parts:
                    if kind == "postgresql" and not server:
                        row = {"missing": "there is no PostgreSQL on this machine"}
                    else:
                        url = server.fresh() if server and kind == "postgresql" else ""
                        row = PARTS[part](Path(folder) / f"{kind}-{part}", url, bundles, options)
                    _keep({"database": kind, "part": part} | row)
    finally:
        if server:
            server.close()


def _keep(row: dict[str, Any]) -> None:
    """Beside the rows of other parts that were measured before."""
    same = (row["database"], row["part"])
    rows = [*(r for r in kept("crowd_load") if (r["database"], r["part"]) != same), row | {"commit": machine()["commit"]}]
    rows.sort(key=lambda r: (r["part"], r["database"]), reverse=True)
    keep("crowd_load", rows, {f"{r['part']}, {r['database']}": {k: v for k, v in r.items() if k not in ("database", "part")} for r in rows})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--submitters", type=int, default=64)
    parser.add_argument("--bundles", type=int, default=50, help="of each submitter")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--killed-bundles", type=int, default=640, help="of all submitters, while the server is being killed")
    parser.add_argument("--results", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=400)
    parser.add_argument("--databases", default="sqlite,postgresql")
    parser.add_argument("--parts", default="submit,kill,leaderboard")
    return parser.parse_args()


class Sender:
    """Sends bundles until each is acknowledged, over connections of its own."""

    def __init__(self, server: Process, tokens: list[str]) -> None:
        self.server, self.tokens = server, tokens
        self.acknowledged: set[str] = set()
        self.seconds: list[float] = []
        self.codes: list[int] = []
        self.lost_connections = 0
        self._local = threading.local()

    def send(self, bundle: tuple[int, str, bytes]) -> None:
        """Again after a lost connection, 429 and 503."""
        account, name, body = bundle
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            started = time.monotonic()
            try:
                answer = self._client().post(f"{self.server.base}/api/v1/bundles", content=body,
                                             headers=headers_of(body, self.tokens[account]))
            except httpx.TransportError:
                self.lost_connections += 1
                time.sleep(0.05)
                continue
            if answer.status_code not in (429, 503):
                break
            time.sleep(0.2)
        assert answer.status_code in (200, 201), answer.text
        self.seconds.append(time.monotonic() - started)
        self.codes.append(answer.status_code)
        self.acknowledged.add(name)

    def _client(self) -> httpx.Client:
        if not hasattr(self._local, "client"):
            self._local.client = httpx.Client(timeout=120, verify=False)
        return self._local.client


def submit(place: Path, url: str, bundles: list, options: argparse.Namespace) -> dict[str, Any]:
    """All at once; every tenth twice."""
    database = Database(read_settings({}, data_dir=place, database_url=url))
    tokens = accounts_of(database, options.submitters)
    server = Process(place, url)
    sender = Sender(server, tokens)
    work = [*bundles, *bundles[::10]]
    random.Random(1).shuffle(work)
    started, load = time.monotonic(), round(os.getloadavg()[0], 1)
    try:
        with ThreadPoolExecutor(options.submitters) as pool:
            list(pool.map(sender.send, work))
        seconds = time.monotonic() - started
    finally:
        server.end()
    check_collection(database, place, bundles)
    database.close()
    return {"submitters": options.submitters, "bundles": len(bundles), "sent": len(work), "new": sender.codes.count(201),
            "known": sender.codes.count(200), "lost": 0, "doubled": 0, "load_average_before": load, "seconds": round(seconds, 1),
            "bundles_per_second": round(len(work) / seconds, 1)} | _spread("answer", sender.seconds)


def kill(place: Path, url: str, bundles: list, options: argparse.Namespace) -> dict[str, Any]:
    """SIGKILL at random instants."""
    bundles = bundles[:options.killed_bundles]
    database = Database(read_settings({}, data_dir=place, database_url=url))
    tokens = accounts_of(database, options.submitters)
    server = Process(place, url)
    sender = Sender(server, tokens)
    chance, kills, missing = random.Random(2), 0, 0
    try:
        with ThreadPoolExecutor(options.submitters) as pool:
            waiting = pool.map(sender.send, bundles)
            while kills < options.kills and len(sender.acknowledged) < len(bundles):
                time.sleep(chance.uniform(0.05, 1.5))
                told = set(sender.acknowledged)
                server.kill()
                kills += 1
                with database.read() as session:
                    missing += len(told - set(session.scalars(select(Bundle.name))))
                server.start()
            list(waiting)
    finally:
        server.kill()
    check_collection(database, place, bundles)
    database.close()
    return {"submitters": options.submitters, "bundles": len(bundles), "kills": kills, "lost_connections": sender.lost_connections,
            "acknowledged_and_lost": missing, "doubled": 0}


# --- leaderboard ----------------------------------------------------------------------------------------------------------
def leaderboard(place: Path, url: str, bundles: list, options: argparse.Namespace) -> dict[str, Any]:
    """Random boards and metrics."""
    database = Database(read_settings({}, data_dir=place, database_url=url))
    database.migrate()
    fill(database, options.results)
    started = time.monotonic()
    with database.write() as session:
        refresh_all(session)
    refreshed = time.monotonic() - started
    with database.read() as session:
        results = len(session.scalars(select(Result.id)).all())
    database.close()
    server, chance = Process(place, url), random.Random(3)
    boards = [{"model": f"model-{chance.randrange(MODELS)}", "device": f"GPU {chance.randrange(DEVICES)}", "metric": chance.choice(METRICS)}
              for _ in range(options.queries)]
    load = round(os.getloadavg()[0], 1)
    try:
        _ask(server, boards[0])
        alone = [_ask(server, board) for board in boards]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda board: _ask(server, board), boards))
    finally:
        server.end()
    row = {"results": results, "queries": len(boards), "load_average_before": load, "seconds_to_refresh_all": round(refreshed, 1)}
    return row | _spread("alone", alone) | _spread("eight_at_a_time", together)


def _ask(server: Process, board: dict[str, str]) -> float:
    started = time.monotonic()
    answer = WEB.get(f"{server.base}/api/v1/leaderboard", params=board)
    seconds = time.monotonic() - started
    assert answer.status_code == 200 and answer.json()["rows"], answer.text
    return seconds


def fill(database: Database, count: int) -> None:
    """So many checked results of a collection as one could be, written straight into the tables."""
    chance = random.Random(4)
    with database.write() as session:
        session.execute(insert(Account), [{"name": f"account-{n}", "created_at": now()} for n in range(200)])
        accounts = session.scalars(select(Account.id)).all()
        made = [{"name": f"{n:032x}", "archive_sha256": f"{n:064x}", "archive_bytes": 1, "manifest_sha256": "0" * 64, "key_id": "",
                 "account_id": chance.choice(accounts), "workflow": f"workflow-{n % 40}", "state": State.CHECKED,
                 "submitted_at": now() - timedelta(days=chance.randrange(300)), "findings": []} for n in range(max(1, count // 50))]
        session.execute(insert(Bundle), made)
        owners = session.execute(select(Bundle.id, Bundle.account_id)).all()
        for rows in _batches(_results(count, owners, chance), 2000):
            session.execute(insert(Result), rows)


def _results(count: int, owners: list, chance: random.Random) -> Iterator[dict[str, Any]]:
    for number in range(count):
        bundle, account = owners[number % len(owners)]
        budget, method = chance.choice(BUDGETS), chance.randrange(METHODS)
        batch, eager = chance.choice(BATCHES), 2**30
        saved = (1 - int(budget[:-1]) / 100 if budget else 0) + chance.uniform(0, 0.02)
        row = {"bundle_id": bundle, "account_id": account, "cell_id": f"{number:016x}", "record_sha256": f"{number:064x}",
               "state": State.CHECKED, "workflow": "load", "kind": "step", "model": f"model-{chance.randrange(MODELS)}",
               "workload": "image_size=224, sgd, float32", "method": f"method-{method}", "device": f"GPU {chance.randrange(DEVICES)}",
               "target": "cuda:0", "is_cpu": False, "is_simulated": False, "batch_size": batch, "budget": budget, "seed": 0, "options": {},
               "outcome": "ok", "truth": "exact", "peak_bytes": int(eager * (1 - saved)), "eager_peak_bytes": eager, "memory_saved": saved,
               "step_seconds": chance.uniform(0.1, 0.5), "overhead": chance.uniform(0, 0.6), "samples": 10,
               "machine_hash": f"{chance.randrange(300):016x}", "telemetry_sha256": f"{number:064x}", "samples_sha256": f"{number:064x}",
               "comparison_key": f"{number % 20000:064x}", "submitted_at": now()}
        yield row | {"standing_key": standing_key(Result(**row))}


def _batches(rows: Iterator[dict], size: int) -> Iterator[list[dict]]:
    part: list[dict] = []
    for row in rows:
        part.append(row)
        if len(part) == size:
            yield part
            part = []
    if part:
        yield part


def _spread(name: str, seconds: list[float]) -> dict[str, float]:
    """Median, 95th percentile and longest, in milliseconds."""
    found = sorted(seconds)
    cut = statistics.quantiles(found, n=20)[-1]
    return {f"{name}_median_ms": round(1000 * statistics.median(found), 1), f"{name}_p95_ms": round(1000 * cut, 1),
            f"{name}_longest_ms": round(1000 * found[-1], 1)}


PARTS = {"submit": submit, "kill": kill, "leaderboard": leaderboard}

if __name__ == "__main__":
    main()
