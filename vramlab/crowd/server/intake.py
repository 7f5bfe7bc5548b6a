"""A body becomes a bundle: unpacked, checked by the rules that the submitter has too, kept, entered. Refused ones leave nothing behind."""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Mapping

from pydantic import ValidationError
from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session

from vramlab.crowd import MANIFEST_FILE, Finding, Report, Severity, check
from vramlab.crowd.archive import unpack
from vramlab.crowd.canonical import read_strict
from vramlab.crowd.contents import Contents
from vramlab.crowd.layout import Limits
from vramlab.crowd.manifest import Manifest, is_truly_signed
from vramlab.crowd.server.accounts import Caller
from vramlab.crowd.server.agreements import MOST_COMPARED
from vramlab.crowd.server.audit import note
from vramlab.crowd.server.database import Database
from vramlab.crowd.server.fingerprints import FEWEST_STEPS, are_steps_near, fingerprint_of
from vramlab.crowd.server.marks import make_mark
from vramlab.crowd.server.rows import rows_of
from vramlab.crowd.server.settings import Settings
from vramlab.crowd.server.states import SERVER, move
from vramlab.crowd.server.store import Body, Store
from vramlab.crowd.server.tables import TOMBSTONES, AccountKey, Audit, Bundle, Result, State, Verdict, now
from vramlab.crowd.signing import SigningKey
from vramlab.crowd.verdicts import verdicts
from vramlab.counted import count_of
from vramlab.errors import BundleRefused
from vramlab.record import Outcome
from vramlab.runs import load_run

_log = logging.getLogger(__name__)
DAY = timedelta(days=1)
Examine = Callable[..., Report]  # (folder, limits), and replan_seconds where the server's settings have it


class Refused(Exception):
    """An answer that takes nothing in."""

    def __init__(self, status: int, error: str, findings: tuple[Finding, ...] = (), retry_seconds: float | None = None) -> None:
        self.status, self.error, self.findings, self.retry_seconds = status, error, findings, retry_seconds
        super().__init__(error)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A bundle that is safe on disk."""

    bundle: Bundle
    is_new: bool


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """What the tables will hold of a bundle. A bundle that was not checked yet has no results."""

    manifest: Manifest
    manifest_sha256: str
    report: Report | None
    results: tuple[Result, ...] = ()
    verdicts: tuple[Mapping[str, Any], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)


class Intake:
    """Takes bundles in for one server."""

    def __init__(self, settings: Settings, database: Database, store: Store, key: SigningKey, examine: Examine = check) -> None:
        self.settings, self.database, self.store, self.key, self.examine = settings, database, store, key, examine
        self.limits = Limits(archive_bytes=settings.max_archive_bytes)
        self.is_due = threading.Event()  # a received bundle waits for its check
        self._slots = threading.BoundedSemaphore(settings.check_slots)

    def take(self, body: Body, caller: Caller, patience_seconds: float) -> Taken:
        """The bundle of a finished body, checked when that can begin in time. Refused says why not."""
        if known := self._known(caller, archive_sha256=body.sha256):
            return known
        with self.store.folder() as folder:
            place = self._unpack(body.path, folder)
            if known := self._known(caller, name=place.name):
                return known
            manifest, sha256 = _read_manifest(place)
            prepared = self._check_in_time(place, manifest, sha256, patience_seconds)
        with self.database.read() as session:  # before the archive is kept: a refused one leaves nothing
            self._check_claim(session, caller, manifest, body.nbytes)
        self.store.keep(body)
        taken = self._enter(body, caller, prepared)
        if taken.bundle.state == State.RECEIVED:
            self.is_due.set()
        return taken

    def _known(self, caller: Caller, **which: str) -> Taken | None:
        with self.database.read() as session:
            return _known_in(session, caller, **which)

    def _unpack(self, archive: Path, into: Path) -> Path:
        try:
            return unpack(archive.read_bytes(), into, self.limits)
        except BundleRefused as refusal:
            raise Refused(422, "the archive is refused", (Finding.of(refusal),)) from None

    def _check_in_time(self, place: Path, manifest: Manifest, sha256: str, patience_seconds: float) -> _Prepared:
        """Checked, when there is a free slot in time; else as it came."""
        if not self._slots.acquire(timeout=max(0.0, patience_seconds)):
            if not is_truly_signed(manifest.model_dump()):
                raise Refused(422, "the signature is not that of the key", (_finding("signature", MANIFEST_FILE, "it does not sign this"),))
            return _Prepared(manifest=manifest, manifest_sha256=sha256, report=None)
        try:
            prepared = self._prepare(place, manifest, sha256)
        finally:
            self._slots.release()
        if self.settings.replan_seconds > 0:  # which takes longer than a client waits: what is sound by now is checked whole afterwards
            return _Prepared(manifest=manifest, manifest_sha256=sha256, report=None)
        return prepared

    def _prepare(self, place: Path, manifest: Manifest, sha256: str, **options: float) -> _Prepared:
        """The whole check and the rows. Refused where the check refuses, or where a row cannot hold what a record says."""
        report = self.examine(place, self.limits, **options)
        if not report.is_accepted:
            raise Refused(422, "the check refuses the bundle", report.findings)
        run = load_run(place)
        try:
            results = tuple(rows_of(run))
        except BundleRefused as refusal:
            raise Refused(422, "the check refuses the bundle", (*report.findings, Finding.of(refusal))) from None
        columns = {"workflow_sha256": str(run.workflow.get("sha256") or "")[:64], "harness_version": manifest.vramlab[:200],
                   "is_complete": manifest.is_complete}
        return _Prepared(manifest=manifest, manifest_sha256=sha256, report=report, results=results, verdicts=tuple(verdicts(run)),
                         columns=columns)

    def _enter(self, body: Body, caller: Caller, prepared: _Prepared) -> Taken:
        """One transaction: the bundle and everything that hangs on it."""
        name = prepared.manifest.bundle
        try:
            with self.database.write() as session:
                if known := _known_in(session, caller, name=name):
                    return known
                if self._check_claim(session, caller, prepared.manifest, body.nbytes) is None:
                    signature = prepared.manifest.signature
                    session.add(AccountKey(account_id=caller.account_id, key_id=signature.key_id, public_key=signature.public_key))
                bundle = _new_bundle(body, caller, prepared)
                session.add(bundle)
                session.flush()
                note(session, actor=caller.account, token=caller.token, action="bundle received", subject=f"bundle {name}",
                     detail={"archive_sha256": body.sha256, "bytes": body.nbytes})
                if prepared.report:
                    self._settle(session, bundle, prepared)
                session.refresh(bundle)
        except IntegrityError as error:  # a row that another server of this database entered between our look and our write
            raise Refused(503, "somebody else is entering the same; come again", retry_seconds=1) from error
        return Taken(bundle=bundle, is_new=True)

    def _check_claim(self, session: Session, caller: Caller, manifest: Manifest, nbytes: int) -> AccountKey | None:
        """The key's row, None for a new key. Refused when the account may send no more today, or when the key is not its own."""
        since = now() - DAY
        count, total = session.execute(select(func.count(), func.coalesce(func.sum(Bundle.archive_bytes), 0)).where(
            Bundle.account_id == caller.account_id, Bundle.submitted_at > since)).one()
        if count >= self.settings.bundles_per_day or int(total) + nbytes > self.settings.bytes_per_day:
            sent = f"{count_of(count, 'bundle')} of {int(total):,} bytes"
            raise Refused(429, f"the account has sent {sent} within a day; that is what it may", retry_seconds=3600)
        return _own_key(session, caller, manifest)

    def sweep(self) -> None:
        """Remove archives that no bundle has: of servers that were killed between keeping and entering. Once, when the server starts."""
        with self.database.read() as session:
            for path in self.store.stale_archives():
                if not session.scalar(select(Bundle.id).where(Bundle.archive_sha256 == path.name.partition(".")[0]).limit(1)):
                    path.unlink()

    def fill_fingerprints(self) -> None:
        """Of results that were taken in before there were any: from their archives. Once, after the server has started."""
        bare = (Result.fingerprint.is_(None), Result.is_simulated.is_(False), Result.outcome == Outcome.OK)
        with self.database.read() as session:
            pending = session.execute(select(Bundle.id, Bundle.archive_sha256).where(
                Bundle.id.in_(select(Result.bundle_id).where(*bare))).order_by(Bundle.id)).all()
        for number, archive_sha256 in pending:
            try:
                found = self._fingerprints(archive_sha256)
            except (OSError, Refused, BundleRefused):
                _log.warning("of received bundle number %s there are no fingerprints: its archive cannot be read", number)
                continue
            with self.database.write() as session:
                for row in session.scalars(select(Result).where(Result.bundle_id == number, *bare)):
                    row.fingerprint = found.get(row.cell_id)

    def _fingerprints(self, archive_sha256: str) -> dict[str, Any]:
        with self.store.folder() as folder:
            run = load_run(self._unpack(self.store.path(archive_sha256), folder))
            contents = Contents(run.folder, self.limits)
            return {cell.cell_id: fingerprint_of(contents, cell.record) for cell in run.cells if cell.record}

    def _settle(self, session: Session, bundle: Bundle, prepared: _Prepared) -> None:
        """Enter what the check came to."""
        assert prepared.report
        copies = _copies(session, bundle, prepared.results)
        copies += _relabelled(session, bundle, prepared.results)
        copies += _near_copies(session, bundle, prepared.results, {finding.where for finding in copies})
        copies += _doubted(session, bundle, prepared.results)
        bundle.findings = prepared.report.to_json()["findings"] + [_in_json(finding) for finding in copies]
        bundle.checked_at = now()
        for name, value in prepared.columns.items():
            setattr(bundle, name, value)
        for row in prepared.results:
            row.bundle_id, row.account_id, row.state, row.submitted_at = bundle.id, bundle.account_id, bundle.state, bundle.submitted_at
            session.add(row)
        for verdict in prepared.verdicts:
            session.add(_verdict(bundle, verdict))
        session.flush()
        if not prepared.report.is_accepted:
            move(session, bundle, State.FLAGGED, reason="the check refuses it", actor=SERVER, settings=self.settings)
        elif copies:
            move(session, bundle, State.FLAGGED, reason=copies[0].message, actor=SERVER, settings=self.settings)
        else:
            move(session, bundle, State.CHECKED, actor=SERVER, settings=self.settings)
        make_mark(session, bundle, self.key)

    # ------------------------------------------------------------------------------------------------ checked afterwards

    def check_received(self) -> int:
        """Check the bundles that were acknowledged before there was time to; how many there were. One that fails is flagged.

        One that cannot be checked at all, such as one whose archive is lost, stays received and does not hold up those after it.
        """
        done, after = 0, 0
        while pending := self._next_received(after):
            after, _ = pending
            try:
                self._check_afterwards(*pending)
                done += 1
            except SQLAlchemyError:
                raise
            except Exception:
                _log.exception("received bundle number %s could not be checked", after)
        return done

    def _next_received(self, after: int) -> tuple[int, str] | None:
        with self.database.read() as session:
            found = session.execute(select(Bundle.id, Bundle.archive_sha256).where(Bundle.state == State.RECEIVED, Bundle.id > after)
                                    .order_by(Bundle.id).limit(1)).first()
        return None if found is None else (found.id, found.archive_sha256)

    def _check_afterwards(self, number: int, archive_sha256: str) -> None:
        with self._slots, self.store.folder() as folder:
            place = self._unpack(self.store.path(archive_sha256), folder)
            manifest, sha256 = _read_manifest(place)
            options = {"replan_seconds": self.settings.replan_seconds} if self.settings.replan_seconds > 0 else {}
            try:
                prepared = self._prepare(place, manifest, sha256, **options)
            except Refused as refusal:
                report = Report(bundle=manifest.bundle, findings=refusal.findings)
                prepared = _Prepared(manifest=manifest, manifest_sha256=sha256, report=report)
        with self.database.write() as session:
            bundle = session.get(Bundle, number)
            if bundle and bundle.state == State.RECEIVED:  # else withdrawn meanwhile, or another server was first
                self._settle(session, bundle, prepared)


def _known_in(session: Session, caller: Caller, **which: str) -> Taken | None:
    """A bundle that is there already, when it is the caller's own. Refused when it is another's: nobody submits for somebody else."""
    conditions = [getattr(Bundle, column) == value for column, value in which.items()]
    bundle = session.scalar(select(Bundle).where(*conditions).order_by(Bundle.id).limit(1))
    if bundle is None:
        return None
    if bundle.account_id != caller.account_id:
        raise Refused(409, f"bundle {bundle.name} is there already, from another account")
    return Taken(bundle=bundle, is_new=False)


def _read_manifest(place: Path) -> tuple[Manifest, str]:
    data = (place / MANIFEST_FILE).read_bytes()
    try:
        return Manifest.model_validate(read_strict(data, MANIFEST_FILE)), hashlib.sha256(data).hexdigest()
    except BundleRefused as refusal:
        raise Refused(422, "the manifest is refused", (Finding.of(refusal),)) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])[:200]
        raise Refused(422, "the manifest is refused", (_finding("manifest", f"{MANIFEST_FILE}:{where}", first["msg"]),)) from None


def _new_bundle(body: Body, caller: Caller, prepared: _Prepared) -> Bundle:
    manifest = prepared.manifest
    return Bundle(name=manifest.bundle, archive_sha256=body.sha256, archive_bytes=body.nbytes, manifest_sha256=prepared.manifest_sha256,
                  account_id=caller.account_id, key_id=manifest.signature.key_id, workflow=manifest.workflow, run_id=manifest.run_id or "",
                  harness_version=manifest.vramlab, is_complete=manifest.is_complete, supersedes=manifest.supersedes or "",
                  state=State.RECEIVED)


def _own_key(session: Session, caller: Caller, manifest: Manifest) -> AccountKey | None:
    """A key belongs to the account that used it first. None for one that nobody has used."""
    signature = manifest.signature
    known = session.scalar(select(AccountKey).where(AccountKey.key_id == signature.key_id))
    if known and known.account_id != caller.account_id:
        raise Refused(403, f"key {signature.key_id} belongs to another account")
    if known and (known.public_key != signature.public_key or known.revoked_at):
        raise Refused(403, f"key {signature.key_id} is revoked" if known.revoked_at else f"there is another key {signature.key_id}")
    return known


def _copies(session: Session, bundle: Bundle, rows: tuple[Result, ...]) -> list[Finding]:
    """Telemetry and timed steps that are in another account's results already: no two measurements give the same.

    Not where this account had them first: who copies somebody's results cannot keep their owner from sending them again.
    """
    found = []
    for rule, column in (("telemetry-copied", Result.telemetry_sha256), ("samples-copied", Result.samples_sha256)):
        hashes = {getattr(row, column.key): row.cell_id for row in rows if getattr(row, column.key)}
        for start in range(0, len(hashes), 500):
            part = list(hashes)[start:start + 500]
            earliest = select(column, func.min(Result.id)).where(column.in_(part), Result.account_id == bundle.account_id)
            first = {value: number for value, number in session.execute(earliest.group_by(column))}
            others = session.execute(select(column, Result.id).where(column.in_(part), Result.account_id != bundle.account_id))
            found += [_finding(rule, f"cells/{hashes[value]}", f"the same as of result {number}, of another account", Severity.WARNING)
                      for value, number in others if value not in first or number < first[value]]
    return found


def _relabelled(session: Session, bundle: Bundle, rows: tuple[Result, ...]) -> list[Finding]:
    """Telemetry and timed steps of this account's result of another cell, such as of another seed: each cell is measured on its own.

    Eager's steps are those of its baseline, which the cells of several experiments may share.
    """
    found = []
    for rule, column in (("telemetry-copied", Result.telemetry_sha256), ("samples-copied", Result.samples_sha256)):
        may_share = column is Result.samples_sha256
        hashes = {getattr(row, column.key): row.cell_id for row in rows
                  if getattr(row, column.key) and not (may_share and row.method == "eager")}
        for start in range(0, len(hashes), 500):
            part = list(hashes)[start:start + 500]
            mine = select(column, Result.id, Result.cell_id).where(column.in_(part), Result.account_id == bundle.account_id)
            found += [_finding(rule, f"cells/{hashes[value]}", f"the same as of result {number}, of another cell", Severity.WARNING)
                      for value, number, cell_id in session.execute(mine) if cell_id != hashes[value]]
    return found


def _near_copies(session: Session, bundle: Bundle, rows: tuple[Result, ...], known: set[str]) -> list[Finding]:
    """Step times that are those of another account's result of the same cell, each changed a little. `known`: cells that are copies anyway.

    They belong to the account whose result was first, as exact ones do.
    """
    found = []
    for row in rows:
        where = f"cells/{row.cell_id}"
        if where in known or not row.fingerprint or len(row.fingerprint["steps"][0]) < FEWEST_STEPS:
            continue
        earlier = select(Result.id, Result.account_id, Result.fingerprint).where(
            Result.comparison_key == row.comparison_key, Result.fingerprint.is_not(None)).order_by(Result.id).limit(MOST_COMPARED)
        first = next((other for other in session.execute(earlier) if are_steps_near(row.fingerprint, other.fingerprint)), None)
        if first and first.account_id != bundle.account_id:
            told = f"step times are those of result {first.id}, of another account, each changed a little"
            found.append(_finding("samples-copied", where, told, Severity.WARNING))
    return found


def _doubted(session: Session, bundle: Bundle, rows: tuple[Result, ...]) -> list[Finding]:
    """Results of the same account that are withdrawn, or flagged, or were when they were superseded: to send them again in another bundle
    clears nothing."""
    found: dict[str, Finding] = {}
    for column in (Result.record_sha256, Result.telemetry_sha256, Result.samples_sha256):
        hashes = {getattr(row, column.key): row.cell_id for row in rows if getattr(row, column.key)}
        for start in range(0, len(hashes), 500):
            part = list(hashes)[start:start + 500]
            mine = select(column, Result.id, Result.state, Bundle.name).join(Bundle, Bundle.id == Result.bundle_id).where(
                column.in_(part), Result.account_id == bundle.account_id, Result.state.in_((State.FLAGGED, *TOMBSTONES)))
            for value, number, state, name in session.execute(mine):
                if state != State.SUPERSEDED or _ended_flagged(session, name):
                    found.setdefault(hashes[value], _finding("doubted-before", f"cells/{hashes[value]}", "the same as of result "
                                                             f"{number}, which is {state}", Severity.WARNING))
    return list(found.values())


def _ended_flagged(session: Session, bundle: str) -> bool:
    """Whether the last that was said of a bundle, before it was superseded, is a doubt."""
    said = select(Audit.action).where(Audit.subject == f"bundle {bundle}", Audit.action.in_(("bundle flagged", "bundle checked")))
    return session.scalar(said.order_by(Audit.id.desc()).limit(1)) == "bundle flagged"


def _verdict(bundle: Bundle, body: Mapping[str, Any]) -> Verdict:
    return Verdict(bundle_id=bundle.id, account_id=bundle.account_id, claim=body["id"][:200], experiment=body["experiment"][:200],
                   rule=body["rule"][:200], verdict=body["verdict"], obtained=body["obtained"], is_simulated=body["is_simulated"],
                   evidence=list(body["evidence"]), state=bundle.state)


def _finding(rule: str, where: str, message: str, severity: Severity = Severity.ERROR) -> Finding:
    return Finding(rule, severity, where, message)


def _in_json(finding: Finding) -> dict[str, str]:
    return {"rule": finding.rule, "severity": str(finding.severity), "where": finding.where, "message": finding.message}


