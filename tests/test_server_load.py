"""The load run of benchmarks/crowd_load.py, small. The leaderboard reads its summary by an index, and says what the results say."""

from __future__ import annotations

import importlib.util
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
from sqlalchemy import event, select, text

from vramlab.crowd.server.database import Database
from vramlab.crowd.server.queries import METRICS, leaderboard
from vramlab.crowd.server.settings import read_settings
from vramlab.crowd.server.standings import refresh_all
from vramlab.crowd.server.tables import Result

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
BOTH = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]


@pytest.fixture(scope="module")
def load():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("crowd_load", BENCHMARKS / "crowd_load.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


@pytest.fixture(params=BOTH)
def filled(request, tmp_path, load):
    url = request.getfixturevalue("postgres").fresh() if request.param == "postgresql" else None
    database = Database(read_settings({}, data_dir=tmp_path, database_url=url))
    database.migrate()
    load.fill(database, 3000)
    with database.write() as session:
        refresh_all(session)
    yield database
    database.close()


def test_the_leaderboard_is_that_of_the_results(filled):
    """Against a plain loop over all results."""
    board = {"model": "model-3", "device": "GPU 4"}
    with filled.read() as session:
        rows = [r for r in session.scalars(select(Result)) if (r.model, r.device) == tuple(board.values())]
        for metric in ("memory_saved", "overhead"):
            is_less = METRICS[metric][0]
            best: dict[str, Result] = {}
            for row in rows:
                value, other = getattr(row, metric), best.get(row.method)
                if other is None or (value < getattr(other, metric) if is_less else value > getattr(other, metric)):
                    best[row.method] = row
            wanted = sorted(((getattr(r, metric), r.method, r.id) for r in best.values()), reverse=not is_less)
            found = leaderboard(session, **board, metric=metric).rows
            assert rows and [(r.value, r.method, r.result) for r in found] == wanted


def test_the_leaderboard_reads_its_summary_only_and_by_an_index(filled):
    said: list[tuple[str, object]] = []
    event.listen(filled.engine, "before_cursor_execute", lambda *a: said.append((a[2], a[3])))
    with filled.read() as session:
        started = time.process_time()
        leaderboard(session, model="model-3", device="GPU 4", metric="peak_bytes")
        seconds = time.process_time() - started
    statements = [(sql, values) for sql, values in said if sql.lstrip().startswith("SELECT")]
    assert len(statements) == 2 and all("FROM standing" in sql and "result " not in sql.partition("FROM")[2] for sql, _ in statements)
    assert seconds < 0.2
    with filled.engine.connect() as connection:
        if connection.dialect.name == "sqlite":
            for sql, values in statements:
                plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values).all()
                assert any("ix_standing_board" in row[-1] for row in plan) and not any("SCAN standing" in row[-1] for row in plan), plan
        else:
            connection.execute(text("SET enable_seqscan = off"))  # so few rows are read faster without an index
            for sql, values in statements:
                plan = "\n".join(row[0] for row in connection.exec_driver_sql(f"EXPLAIN {sql}", values))
                assert "ix_standing_" in plan, plan


@pytest.mark.slow
def test_the_load_run_holds_in_small(load, tmp_path):
    """Submitting, killing and asking as the benchmark does, with a few of each."""
    options = Namespace(submitters=4, bundles=4, kills=2, killed_bundles=16, results=3000, queries=10)
    bundles = load.make_bundles(tmp_path / "made", options.submitters, options.bundles)
    sent = load.submit(tmp_path / "submit", "", bundles, options)
    assert (sent["new"], sent["known"], sent["bundles"]) == (16, 2, 16)
    killed = load.kill(tmp_path / "kill", "", bundles, options)
    assert killed["acknowledged_and_lost"] == 0
    asked = load.leaderboard(tmp_path / "board", "", bundles, options)
    assert asked["results"] == 3000 and asked["alone_p95_ms"] > 0
