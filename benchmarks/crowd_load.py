"""The server of shared results under load: many submitters at once, kill -9 in the middle, a leaderboard over many results.

    python benchmarks/crowd_load.py [--submitters 64] [--bundles 50] [--kills 20] [--results 100000] [--databases sqlite,postgresql]
                                    [--parts submit,kill,leaderboard,check,submit-checked]
    python benchmarks/crowd_load.py --parts leaderboard                        the leaderboard alone: some minutes
    python benchmarks/crowd_load.py --parts check,submit-checked --checked 10  every rule of the checker, ten bundles a submitter

    submit          all submitters at once, every tenth bundle sent a second time; what is there afterwards is held against what was sent
    kill            some of these bundles into a new server that is killed with SIGKILL at random instants and started again; after each
                    kill everything that was acknowledged has to be there
    leaderboard     seconds of GET /api/v1/leaderboard and of the page /leaderboard over HTTP, for one client and for eight at a time: each
                    address for the first time, then while the collection changes ten times a second, so that hardly an answer is kept
    check           seconds of the checker alone, for bundles of 4 and of 100 cells, of a small step and of a larger one, and for one that
                    is given: --bundle FOLDER
    submit-checked  as submit, but the server asks every rule, of bundles of four cells that keep them all (tests/genuine.py)

Everything is on this machine's loopback address, in folders that go afterwards. The records of `submit` and `kill` are written by hand, so
there the server asks the first round of rules only: every byte, the manifest, the signature. PostgreSQL runs without fsync, SQLite with it.
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
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Iterator

from common import ROOT, keep, kept, machine

sys.path[:0] = [str(ROOT / "tests")]
import httpx  # noqa: E402
from conftest import find_postgres  # noqa: E402
from crowd_made import headers_of  # noqa: E402
from genuine import genuine_bundle, step  # noqa: E402
from postgres import Postgres  # noqa: E402
from sqlalchemy import insert, select  # noqa: E402
from test_server_faults import WEB, Process, accounts_of, check_collection, make_bundles  # noqa: E402

from vramlab.crowd import archive, check  # noqa: E402
from vramlab.crowd.server.audit import note  # noqa: E402
from vramlab.crowd.server.database import Database  # noqa: E402
from vramlab.crowd.server.rows import standing_key  # noqa: E402
from vramlab.crowd.server.settings import read_settings  # noqa: E402
from vramlab.crowd.server.standings import refresh_all  # noqa: E402
from vramlab.crowd.server.tables import Account, Bundle, Result, State, now  # noqa: E402
from vramlab.crowd.signing import make_key  # noqa: E402
from vramlab.runs import load_run  # noqa: E402

SECONDS = 900  # at most, for one part
MODELS, DEVICES, METHODS, BATCHES, BUDGETS = 12, 10, 15, (16, 32, 64), ("", "80%", "60%", "40%")
METRICS = ("memory_saved", "peak_bytes", "overhead", "step_seconds")
CELLS = 4  # of a genuine bundle


def main() -> None:
    options = _options()
    server = Postgres() if "postgresql" in options.databases and find_postgres() else None
    parts = options.parts.split(",")
    try:
        with tempfile.TemporaryDirectory() as folder:
            bundles = make_bundles(Path(folder) / "made", options.submitters, options.bundles) if {"submit", "kill"} & set(parts) else []
            options.genuine = _genuine(Path(folder) / "genuine", options) if "submit-checked" in parts else []
            print(f"{len(bundles) + len(options.genuine)} bundles are made", flush=True)
            if "check" in parts:
                _keep({"database": "none", "part": "check"} | check_alone(Path(folder) / "check", options.bundle))
            for kind in options.databases.split(","):
                for part in (part for part in parts if part != "check"):
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
    parser.add_argument("--queries", type=int, default=240, help="of one pass: at most half of the boards and metrics that there are")
    parser.add_argument("--bundle", type=Path, help="for check: a bundle's folder")
    parser.add_argument("--checked", type=int, default=10, help="bundles of each submitter for submit-checked")
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


def submit(place: Path, url: str, bundles: list, options: argparse.Namespace, rules: str = "wrapping") -> dict[str, Any]:
    """All at once; every tenth twice."""
    database = Database(read_settings({}, data_dir=place, database_url=url))
    tokens = accounts_of(database, options.submitters)
    server = Process(place, url, rules)
    sender = Sender(server, tokens)
    work = [*bundles, *bundles[::10]]
    random.Random(1).shuffle(work)
    started, load = time.monotonic(), round(os.getloadavg()[0], 1)
    try:
        with ThreadPoolExecutor(options.submitters) as pool:
            list(pool.map(sender.send, work))
        seconds = time.monotonic() - started
        settled = _until_checked(database, started)
    finally:
        server.end()
    check_collection(database, place, bundles, CELLS if rules == "all" else 1)
    database.close()
    return {"seconds_until_all_are_checked": round(settled, 1),
            "submitters": options.submitters, "bundles": len(bundles), "sent": len(work), "new": sender.codes.count(201),
            "known": sender.codes.count(200), "lost": 0, "doubled": 0, "load_average_before": load, "seconds": round(seconds, 1),
            "bundles_per_second": round(len(work) / seconds, 1)} | _spread("answer", sender.seconds)


def submit_checked(place: Path, url: str, bundles: list, options: argparse.Namespace) -> dict[str, Any]:
    """The same, and every rule is asked."""
    return submit(place, url, options.genuine, options, "all")


def _until_checked(database: Database, started: float) -> float:
    """Seconds since the start when no bundle waits for its check any more: some are acknowledged before there is time for it."""
    while time.monotonic() - started < SECONDS:
        with database.read() as session:
            if not session.scalar(select(Bundle.id).where(Bundle.state == State.RECEIVED).limit(1)):
                break
        time.sleep(0.2)
    return time.monotonic() - started


def _genuine(folder: Path, options: argparse.Namespace) -> list[tuple[int, str, bytes]]:
    """(account, name, archive) of bundles that keep every rule, mixed up."""
    made = []
    for account in range(options.submitters):
        key = make_key()
        for number in range(options.checked):
            bundle = genuine_bundle(folder / str(account), seed=account * options.checked + number, machine=f"{account:016x}", key=key)
            made.append((account, bundle.name, archive.pack(bundle)))
    random.Random(0).shuffle(made)
    return made


def check_alone(place: Path, given: Path | None) -> dict[str, Any]:
    """The checker on one bundle after another, in this process, which has compiled what it compiles; seconds of processor time."""
    row: dict[str, Any] = {"load_average_before": round(os.getloadavg()[0], 1)}
    for cells, layers in ((CELLS, 6), (100, 6), (100, 100)):
        budgets = tuple(f"{95 - n / 5:g}%" for n in range(cells // 2 - 1))
        bundle = genuine_bundle(place / f"{cells}-{layers}", seed=cells, key=make_key(), budgets=budgets, layers=layers)
        row |= _checked(bundle, f"{cells}_cells_of_{len(step(layers).ops)}_ops")
    if given:
        run = load_run(given)
        row |= _checked(given, f"given_{len(run.records)}_cells_of_{max(r.provenance.get('ops') or 0 for r in run.records)}_ops")
    return row


def _checked(bundle: Path, name: str) -> dict[str, Any]:
    check(bundle)
    seconds = []
    for _ in range(3):
        started = time.process_time()
        report = check(bundle)
        seconds.append(time.process_time() - started)
        assert report.is_accepted, report.errors
    return {f"{name}_check_seconds": round(statistics.median(seconds), 3), f"{name}_archive_bytes": len(archive.pack(bundle))}


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
    server, chance = Process(place, url), random.Random(3)
    boards = [{"model": f"model-{model}", "device": f"GPU {device}", "metric": metric}
              for model in range(MODELS) for device in range(DEVICES) for metric in METRICS]
    chance.shuffle(boards)
    halves = boards[:options.queries], boards[-options.queries:]  # of which none is asked for a second time
    row = {"results": results, "queries": len(halves[0]), "load_average_before": round(os.getloadavg()[0], 1),
           "seconds_to_refresh_all": round(refreshed, 1)}
    try:
        for kind, ask in (("api", _ask_api), ("page", _ask_page)):
            ask(server, {"metric": "largest"})
            row |= _spread(f"{kind}_alone", [ask(server, board) for board in halves[0]])
            row |= _spread(f"{kind}_eight_at_a_time", _at_a_time(8, ask, server, halves[1]))
            with _changing(database):
                row |= _spread(f"{kind}_alone_while_it_changes", [ask(server, board) for board in halves[0]])
                row |= _spread(f"{kind}_eight_at_a_time_while_it_changes", _at_a_time(8, ask, server, halves[1]))
    finally:
        server.end()
        database.close()
    return row


def _at_a_time(clients: int, ask: Callable[[Process, dict[str, str]], float], server: Process, boards: list[dict[str, str]]) -> list[float]:
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda board: ask(server, board), boards))


@contextmanager
def _changing(database: Database) -> Iterator[None]:
    """A row of the audit log every tenth of a second, as a submission leaves some: what was kept is good no more."""
    is_over = threading.Event()

    def change() -> None:
        while not is_over.wait(0.1):
            with database.write() as session:
                note(session, actor="benchmark", action="changed", subject="nothing")

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _ask_api(server: Process, board: dict[str, str]) -> float:
    first = {"model": "model-0", "device": "GPU 0"}
    return _timed(f"{server.base}/api/v1/leaderboard", first | board, '"rank":1' if len(board) > 1 else "")


def _ask_page(server: Process, board: dict[str, str]) -> float:
    device = {"device": f"measured:{board['device']}"} if "device" in board else {}
    return _timed(f"{server.base}/leaderboard", board | device, "<tbody>" if len(board) > 1 else "")


def _timed(address: str, query: dict[str, str], has_to_say: str) -> float:
    started = time.monotonic()
    answer = WEB.get(address, params=query)
    seconds = time.monotonic() - started
    assert answer.status_code == 200 and has_to_say in answer.text, answer.text[:1000]
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


PARTS = {"submit": submit, "kill": kill, "leaderboard": leaderboard, "submit-checked": submit_checked}

if __name__ == "__main__":
    main()
