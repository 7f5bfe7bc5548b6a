"""Bundles for the server's tests, from records written by hand: whose, from which machine, with which numbers.

Every bundle is truly packed and signed. The records are not those of a real run, so the server under test asks only the first round of
rules (`wrapping`: layout, manifest, hashes, signature) unless a test says otherwise; the rules themselves have tests of their own.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Mapping, Sequence

from fastapi.testclient import TestClient
from hand_made import ENVIRONMENT, MIB, measured_step, write_run, write_telemetry

from vramlab.crowd import archive, pack_run
from vramlab.crowd.findings import Report
from vramlab.crowd.layout import Limits
from vramlab.crowd.rules.asking import Examination, Round
from vramlab.crowd.server.accounts import create_account, create_token
from vramlab.crowd.server.app import create_app
from vramlab.crowd.server.settings import Settings, read_settings
from vramlab.crowd.signing import SigningKey, make_key
from vramlab.record import RunRecord

JSON = Mapping[str, Any]


def wrapping_only(folder: Path, limits: Limits) -> Report:
    """What lies there, the manifest, every byte, the signature."""
    examination = Examination(folder, limits)
    examination.ask(Round.WRAPPING)
    return examination.report()


def environment(host: str, gpu: str | None = None) -> dict[str, Any]:
    """ENVIRONMENT of a machine with this hash and, when named, a GPU of this model."""
    body = copy.deepcopy(ENVIRONMENT)
    body["system"]["host_hash"] = hashlib.sha256(host.encode()).hexdigest()[:16]
    if gpu:
        body["gpus"] = [{"name": gpu, "memory_bytes": 32 * 2**30}]
    return body


def measured(number: int = 0, *, host: str = "one", gpu: str | None = None, method: str = "delta", peak_mib: float = 500.0,
             ratio: float = 1.3, budget: str | None = "60%", **config: Any) -> RunRecord:
    """A measured cell; `number` makes its timed steps its own."""
    record = measured_step(method, peak_mib, budget=budget, ratio=ratio, environment=environment(host, gpu),
                           config={"target": "cuda:0" if gpu else "cpu", **config})
    jitter = [1 + (number * 7 + i) % 1000003 * 1e-9 for i in range(5)]
    block = {**record.measured, "step_seconds": [s * j for s, j in zip(record.measured["step_seconds"], jitter)]}
    return replace(record, measured=block)


def run_of(folder: Path, records: Sequence[RunRecord], number: int = 0, **plan: Any) -> Path:
    """A run on disk with telemetry of its own, and hashes of it in the records."""
    write_run(folder, records, run_id=f"run-{number}", **plan)
    for index, record in enumerate(records):
        cell = folder / "cells" / record.cell_id
        write_telemetry(cell / "telemetry.csv.gz", [(0.1 * i, 500 * MIB + 4096 * (number * 100 + index) + i) for i in range(5)])
        files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in cell.iterdir() if p.name.endswith(".gz")}
        replace(record, files=files).save(cell / "record.json")
    return folder


def packed(folder: Path, records: Sequence[RunRecord], number: int = 0, *, key: SigningKey | None = None, supersedes: str | None = None,
           **plan: Any) -> tuple[str, bytes]:
    """(name, archive) of a bundle of these records."""
    bundle = pack_run(run_of(folder / f"run-{number}", records, number, **plan), key=key or make_key(), supersedes=supersedes)
    bundle.write(folder / "bundles")
    return bundle.name, archive.pack(bundle.place(folder / "bundles"))


def headers_of(body: bytes, token: str) -> dict[str, str]:
    """As a client sends them."""
    digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
    return {"Authorization": f"Bearer {token}", "Content-Type": "application/gzip", "Digest": f"sha-256={digest}"}


@dataclass
class Served:
    """A server in this process, with accounts and their tokens."""

    settings: Settings
    web: TestClient
    tokens: dict[str, str]
    keys: dict[str, SigningKey]
    folder: Path
    made: int = 0

    @property
    def database(self):
        return self.web.app.state.database

    def account(self, name: str, *scopes: str) -> str:
        """A new account with a token."""
        with self.database.write() as session:
            create_account(session, name, actor="test")
            self.tokens[name], _ = create_token(session, name, scopes or ("submit",), actor="test")
        self.keys[name] = make_key()
        return self.tokens[name]

    def post(self, account: str, body: bytes, **headers: str):
        """Submit an archive."""
        return self.web.post("/api/v1/bundles", content=body, headers=headers_of(body, self.tokens[account]) | headers)

    def submit(self, account: str, *records: RunRecord, supersedes: str | None = None, **plan: Any) -> dict[str, Any]:
        """A new bundle of these records; the answer's body."""
        self.made += 1
        name, body = packed(self.folder / f"{account}-{self.made}", records or [measured(self.made)], self.made, key=self.keys[account],
                            supersedes=supersedes, **plan)
        answer = self.post(account, body)
        assert answer.status_code == 201, answer.text
        assert answer.json()["bundle"] == name
        return answer.json()

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of an address below /api/v1."""
        answer = self.web.get(f"/api/v1/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def say(self, account: str, path: str, **body: Any):
        """POST of JSON with the account's token."""
        return self.web.post(f"/api/v1/{path}", content=json.dumps(body), headers={
            "Authorization": f"Bearer {self.tokens[account]}", "Content-Type": "application/json"})


def served(folder: Path, url: str | None = None, examine=wrapping_only, **settings: Any):
    """A context: the server with accounts ada, bob and chris (submit), olga (organise), root (admin)."""
    return _Context(partial(_start, folder, url, examine, settings))


def _start(folder: Path, url: str | None, examine: Any, changes: Mapping[str, Any]) -> Served:
    settings = read_settings({}, data_dir=folder / "server", database_url=url, **changes)
    return Served(settings, TestClient(create_app(settings, examine), raise_server_exceptions=False), {}, {}, folder)


class _Context:
    def __init__(self, start) -> None:
        self._start = start

    def __enter__(self) -> Served:
        self._served = self._start()
        self._served.web.__enter__()
        for name, scope in (("ada", "submit"), ("bob", "submit"), ("chris", "submit"), ("olga", "organise"), ("root", "admin")):
            self._served.account(name, scope)
        return self._served

    def __exit__(self, *what: Any) -> None:
        self._served.web.__exit__(*what)
