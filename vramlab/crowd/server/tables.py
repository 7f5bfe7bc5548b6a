"""The tables. One schema for SQLite and PostgreSQL; migrations/ makes it, a test holds the two against each other.

    account -< account_key        whose signatures are whose
    account -< token              what may submit, organise, administer; only a hash of the secret is kept
    account -< bundle -< result   a result is one record: one cell of one run
    bundle  -< verdict            what the run says of claims of papers
    bundle  -< mark               what the server signed about it; the last one holds
    result  -< agreement          which results agree with which, and what that counts as
    standing                      one row a group of comparable results, kept up with every change: what the leaderboard reads
    competition -< entry
    audit                         append-only: triggers refuse to change or to delete a row
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, BigInteger, Boolean, DateTime, Float, ForeignKey, Index, Integer, MetaData, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship
from sqlalchemy.types import TypeDecorator

NAME, HASH, WORDS = 200, 64, 2000  # longest texts: a name, a SHA-256 in hex, a sentence for a person
NAMING = {"ix": "ix_%(table_name)s_%(column_0_N_name)s", "uq": "uq_%(table_name)s_%(column_0_N_name)s",
          "fk": "fk_%(table_name)s_%(column_0_name)s", "pk": "pk_%(table_name)s"}


class State(StrEnum):
    """Of a bundle and of a result. A bundle is never reproduced or repeated as such, its results are."""

    RECEIVED = "received"  # safe on disk, not checked yet: unverified
    CHECKED = "checked"  # the server re-derived every number
    REPRODUCED = "reproduced"  # another account, another machine, telemetry of its own, within the declared tolerance
    REPEATED = "repeated"  # the same owner or the same machine again
    FLAGGED = "flagged"  # a person or a rule doubts it: unverified
    WITHDRAWN = "withdrawn"  # by its owner or an administrator: a tombstone
    SUPERSEDED = "superseded"  # by another bundle of the same account: a tombstone


VERIFIED = (State.CHECKED, State.REPRODUCED, State.REPEATED)
UNVERIFIED = (State.RECEIVED, State.FLAGGED)
TOMBSTONES = (State.WITHDRAWN, State.SUPERSEDED)


class Moment(TypeDecorator):
    """A time in UTC, aware in Python. SQLite keeps no zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> datetime | None:
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None if dialect.name == "sqlite" else UTC)

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


Key = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself in an INTEGER only


def now() -> datetime:
    """This moment in UTC, in whole microseconds."""
    return datetime.now(UTC)


class Base(DeclarativeBase):
    """All tables; constraints have names, so that migrations can find them."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {str: String(NAME), datetime: Moment, dict[str, Any]: JSON, list[Any]: JSON, bool: Boolean, float: Float,
                           int: BigInteger}


class Account(Base):
    """Somebody who submits, organises or administers."""

    __tablename__ = "account"

    id: Mapped[int] = mapped_column(Key, primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)  # lower-case letters, digits, - and _
    display_name: Mapped[str] = mapped_column(default="")
    affiliation: Mapped[str] = mapped_column(default="")
    created_at: Mapped[datetime] = mapped_column(default=now)
    disabled_at: Mapped[datetime | None]


class AccountKey(Base):
    """A public key that signed a bundle of this account; the first account that uses a key owns it."""

    __tablename__ = "account_key"

    id: Mapped[int] = mapped_column(Key, primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("account.id"), index=True)
    key_id: Mapped[str] = mapped_column(String(HASH), unique=True)
    public_key: Mapped[str]
    first_seen_at: Mapped[datetime] = mapped_column(default=now)
    revoked_at: Mapped[datetime | None]


class Token(Base):
    """A secret that an account shows. The secret itself is told once and kept nowhere."""

    __tablename__ = "token"

    id: Mapped[int] = mapped_column(Key, primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("account.id"), index=True)
    public_id: Mapped[str] = mapped_column(String(16), unique=True)  # stands in the token in the clear, finds the row
    secret_sha256: Mapped[str] = mapped_column(String(HASH))
    scopes: Mapped[str]  # "submit", "submit organise", ...
    label: Mapped[str] = mapped_column(default="")
    created_at: Mapped[datetime] = mapped_column(default=now)
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]

    account: Mapped[Account] = relationship(lazy="joined", innerjoin=True)


class Bundle(Base):
    """One submitted run."""

    __tablename__ = "bundle"
    __table_args__ = (Index(None, "account_id", "submitted_at"), Index(None, "workflow", "id"), Index(None, "state", "id"))

    id: Mapped[int] = mapped_column(Key, primary_key=True)
    name: Mapped[str] = mapped_column(String(HASH), unique=True)  # `bundle` of its manifest: a hash of its content
    archive_sha256: Mapped[str] = mapped_column(String(HASH), index=True)
    archive_bytes: Mapped[int]
    manifest_sha256: Mapped[str] = mapped_column(String(HASH))
    account_id: Mapped[int] = mapped_column(ForeignKey("account.id"))
    key_id: Mapped[str] = mapped_column(String(HASH), default="")  # "" for a bundle without a signature
    workflow: Mapped[str]
    workflow_sha256: Mapped[str] = mapped_column(default="")
    run_id: Mapped[str] = mapped_column(default="")
    harness_version: Mapped[str] = mapped_column(default="")
    is_complete: Mapped[bool] = mapped_column(default=True)  # every planned cell has a record
    state: Mapped[str] = mapped_column(String(16))
    submitted_at: Mapped[datetime] = mapped_column(default=now)
    checked_at: Mapped[datetime | None]
    findings: Mapped[list[Any]] = mapped_column(default=list)  # [{rule, severity, where, message}]
    state_reason: Mapped[str] = mapped_column(Text, default="")  # why flagged or withdrawn
    state_changed_at: Mapped[datetime] = mapped_column(default=now)
    supersedes: Mapped[str] = mapped_column(String(HASH), default="")  # the bundle that this one replaces
    superseded_by: Mapped[str] = mapped_column(String(HASH), default="")

    account: Mapped[Account] = relationship(lazy="joined", innerjoin=True)
    results: Mapped[list[Result]] = relationship(back_populates="bundle", order_by="Result.id")


class Result(Base):
    """One record of a bundle. Bytes and seconds; None where there is no such number, the record's `missing` says why."""

    __tablename__ = "result"
    __table_args__ = (
        UniqueConstraint("bundle_id", "cell_id"),
        Index(None, "model", "device", "state"), Index(None, "method", "state"), Index(None, "account_id", "id"),
        Index(None, "standing_key", "state"), Index(None, "state", "id"),
    )

    id: Mapped[int] = mapped_column(Key, primary_key=True)
    bundle_id: Mapped[int] = mapped_column(ForeignKey("bundle.id"))
    account_id: Mapped[int] = mapped_column(ForeignKey("account.id"))
    cell_id: Mapped[str] = mapped_column(String(HASH))
    record_sha256: Mapped[str] = mapped_column(String(HASH), index=True)  # of the bytes of record.json in the archive
    submitted_at: Mapped[datetime] = mapped_column(default=now)
    state: Mapped[str] = mapped_column(String(16))
    reproduced_count: Mapped[int] = mapped_column(Integer, default=0)  # other accounts on other machines that agree
    repeated_count: Mapped[int] = mapped_column(Integer, default=0)

    workflow: Mapped[str]
    experiment: Mapped[str] = mapped_column(default="")
    kind: Mapped[str] = mapped_column(String(32))  # step, train, max_batch
    model: Mapped[str]
    workload: Mapped[str]  # the model's options, optimizer, precision, data: what else a step's memory and time hang on
    method: Mapped[str]  # alias, as the record has it
    method_source_sha256: Mapped[str] = mapped_column(String(HASH), default="")  # the method's version, by content
    harness_version: Mapped[str] = mapped_column(default="")
    device: Mapped[str]  # the GPU's model; "CPU: ..." for a processor; the profile's name where simulated
    target: Mapped[str]  # cpu, cuda:0, sim:v100-32gb
    is_cpu: Mapped[bool]
    is_simulated: Mapped[bool]
    batch_size: Mapped[int | None]
    budget: Mapped[str] = mapped_column(default="")  # as written: 60%, 6GiB; "" without one
    budget_bytes: Mapped[int | None]
    seed: Mapped[int | None]
    options: Mapped[dict[str, Any]] = mapped_column(default=dict)  # the method's own

    outcome: Mapped[str] = mapped_column(String(32))
    reason: Mapped[str] = mapped_column(default="")
    truth: Mapped[str] = mapped_column(String(32))
    peak_bytes: Mapped[int | None]  # measured; of a simulated result *simulated*
    eager_peak_bytes: Mapped[int | None]
    memory_saved: Mapped[float | None]  # 1 - peak / eager's peak
    step_seconds: Mapped[float | None]  # median
    overhead: Mapped[float | None]  # ratio of step times to eager's, less one
    overhead_low: Mapped[float | None]  # of its 95 % bootstrap interval
    overhead_high: Mapped[float | None]
    samples: Mapped[int] = mapped_column(Integer, default=0)  # timed steps
    largest: Mapped[int | None]  # of a search: the largest batch (or depth, ...) that fits
    recomputes: Mapped[int | None]
    moved_bytes: Mapped[int | None]

    machine_hash: Mapped[str] = mapped_column(String(HASH), default="")  # "" where the record names none
    telemetry_sha256: Mapped[str] = mapped_column(String(HASH), default="", index=True)  # of its text; "" without telemetry
    samples_sha256: Mapped[str] = mapped_column(String(HASH), default="", index=True)  # of how the timed steps rank; equal ones are copies
    # What was measured, as far as it tells a copy (fingerprints.py); None of what ran nowhere and of rows that are older than this column.
    fingerprint: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True), deferred=True)
    comparison_key: Mapped[str] = mapped_column(String(HASH), index=True)  # equal: the same cell on the same model of device
    standing_key: Mapped[str] = mapped_column(String(HASH))  # equal: one group of the leaderboard

    bundle: Mapped[Bundle] = relationship(back_populates="results")
    account: Mapped[Account] = relationship(lazy="joined", innerjoin=True)


class Verdict(Base):
    """What a run says of one claim of a paper, judged by the server from the records."""

    __tablename__ = "verdict"
    __table_args__ = (Index(None, "claim", "state"),)

    id: Mapped[int] = mapped_column(Key, primary_key=True)
    bundle_id: Mapped[int] = mapped_column(ForeignKey("bundle.id"), index=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("account.id"), index=True)
    claim: Mapped[str]  # id in reports/claims.yaml
    experiment: Mapped[str] = mapped_column(default="")
    rule: Mapped[str] = mapped_column(default="")
    verdict: Mapped[str] = mapped_column(String(32))
    obtained: Mapped[str] = mapped_column(Text, default="")
    is_simulated: Mapped[bool | None]
    evidence: Mapped[list[Any]] = mapped_column(default=list)  # cell_ids
    state: Mapped[str] = mapped_column(String(16))  # the bundle's

    bundle: Mapped[Bundle] = relationship(lazy="joined", innerjoin=True)


class Mark(Base):
    """What the server says of a bundle, signed with the server's own key. Never changed; a later one replaces it."""

    __tablename__ = "mark"

    id: Mapped[int] = mapped_column(Key, primary_key=True)
    bundle_id: Mapped[int] = mapped_column(ForeignKey("bundle.id"), index=True)
    body: Mapped[dict[str, Any]]  # what is signed, as RFC 8785 bytes
    key_id: Mapped[str] = mapped_column(String(HASH))
    signature: Mapped[str]  # base64
    made_at: Mapped[datetime] = mapped_column(default=now)


class Agreement(Base):
    """Two results that agree within the declared tolerance; one row for each direction."""

    __tablename__ = "agreement"
    __table_args__ = (UniqueConstraint("result_id", "other_id"), Index(None, "result_id", "account_id", "kind"))

    id: Mapped[int] = mapped_column(Key, primary_key=True)
    result_id: Mapped[int] = mapped_column(ForeignKey("result.id"))
    other_id: Mapped[int] = mapped_column(ForeignKey("result.id"), index=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("account.id"))  # the other's
    kind: Mapped[str] = mapped_column(String(16))  # reproduced, repeated
    differences: Mapped[dict[str, Any]] = mapped_column(default=dict)  # metric -> share by which the other differs
    made_at: Mapped[datetime] = mapped_column(default=now)


class Standing(Base):
    """Comparable results of one method: model, workload, device, batch, budget; verified and unverified ones apart, no tombstones."""

    __tablename__ = "standing"
    __table_args__ = (UniqueConstraint("standing_key", "is_verified"),
                      Index("ix_standing_board", "model", "device", "is_simulated", "is_verified", "workload", "batch_size"),
                      Index("ix_standing_facets", "is_verified", "model", "device", "is_simulated", "method", "results"))

    id: Mapped[int] = mapped_column(Key, primary_key=True)
    standing_key: Mapped[str] = mapped_column(String(HASH))
    is_verified: Mapped[bool]
    model: Mapped[str]
    workload: Mapped[str]
    device: Mapped[str]
    is_cpu: Mapped[bool]
    is_simulated: Mapped[bool]
    method: Mapped[str]
    kind: Mapped[str] = mapped_column(String(32))
    batch_size: Mapped[int | None]
    budget: Mapped[str] = mapped_column(default="")
    results: Mapped[int] = mapped_column(Integer, default=0)
    accounts: Mapped[int] = mapped_column(Integer, default=0)
    machines: Mapped[int] = mapped_column(Integer, default=0)
    reproduced: Mapped[int] = mapped_column(Integer, default=0)  # results that somebody else reproduced
    # metric -> {best, low, median, high, n, result}: `result` is the id of the best one
    metrics: Mapped[dict[str, Any]] = mapped_column(default=dict)
    changed_at: Mapped[datetime] = mapped_column(default=now)


class Competition(Base):
    """An organiser fixes model, device, budget, seeds and dates."""

    __tablename__ = "competition"

    id: Mapped[int] = mapped_column(Key, primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)  # stands in its address
    title: Mapped[str]
    description: Mapped[str] = mapped_column(Text, default="")
    organiser_id: Mapped[int] = mapped_column(ForeignKey("account.id"))
    model: Mapped[str]
    workload: Mapped[str] = mapped_column(default="")  # "": any
    device: Mapped[str]
    budget: Mapped[str] = mapped_column(default="")  # "": any
    batch_size: Mapped[int | None]  # None: any
    seeds: Mapped[list[Any]] = mapped_column(default=list)  # whole numbers, of which an entry has all; empty, of old: any one
    metric: Mapped[str] = mapped_column(String(32))
    opens_at: Mapped[datetime]
    closes_at: Mapped[datetime]
    created_at: Mapped[datetime] = mapped_column(default=now)
    closed_early_at: Mapped[datetime | None]
    corrected_at: Mapped[datetime | None]  # the last time; what was changed stands in the audit log
    withdrawn_at: Mapped[datetime | None]  # a tombstone: its page stays, and nothing is ranked
    withdrawn_reason: Mapped[str] = mapped_column(Text, default="", server_default="")

    organiser: Mapped[Account] = relationship(lazy="joined", innerjoin=True)


class Entry(Base):
    """A result in a competition."""

    __tablename__ = "entry"
    __table_args__ = (UniqueConstraint("competition_id", "result_id"),)

    id: Mapped[int] = mapped_column(Key, primary_key=True)
    competition_id: Mapped[int] = mapped_column(ForeignKey("competition.id"))
    result_id: Mapped[int] = mapped_column(ForeignKey("result.id"), index=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("account.id"), index=True)
    entered_at: Mapped[datetime] = mapped_column(default=now)

    result: Mapped[Result] = relationship(lazy="joined", innerjoin=True)


class Audit(Base):
    """One thing that was done. Each row holds the hash of the one before: a row that is taken out or changed shows."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)  # 1, 2, 3, ... without a gap
    at: Mapped[datetime] = mapped_column(default=now)
    actor: Mapped[str]  # an account's name; "server", "command line"
    token: Mapped[str] = mapped_column(String(16), default="")  # its public id
    action: Mapped[str] = mapped_column(String(64), index=True)
    subject: Mapped[str] = mapped_column(index=True)  # "bundle 0123...", "token ...", "account ..."
    detail: Mapped[dict[str, Any]] = mapped_column(default=dict)
    previous_sha256: Mapped[str] = mapped_column(String(HASH))
    sha256: Mapped[str] = mapped_column(String(HASH))
