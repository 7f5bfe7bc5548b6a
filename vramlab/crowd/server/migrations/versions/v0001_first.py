"""The first schema.

Revision ID: 0001
Revises: nothing
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MOMENT = sa.DateTime(timezone=True)
REFUSAL = "the audit log is append-only"


def upgrade() -> None:
    """All tables, and the triggers that keep the audit log."""
    _make_account()
    _make_audit()
    _make_standing()
    _make_account_key()
    _make_bundle()
    _make_competition()
    _make_token()
    _make_mark()
    _make_result()
    _make_verdict()
    _make_agreement()
    _make_entry()
    for statement in _POSTGRESQL if op.get_bind().dialect.name == "postgresql" else _SQLITE:
        op.execute(statement)


def downgrade() -> None:
    """There is nothing before the first schema."""
    raise NotImplementedError("there is nothing before the first schema; restore a backup instead")


_SQLITE = tuple(f"CREATE TRIGGER audit_refuses_{verb.lower()} BEFORE {verb} ON audit BEGIN SELECT RAISE(ABORT, '{REFUSAL}'); END"
                for verb in ("UPDATE", "DELETE"))
_POSTGRESQL = (
    f"CREATE FUNCTION audit_refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '{REFUSAL}'; END $$",
    "CREATE TRIGGER audit_refuses_changes BEFORE UPDATE OR DELETE ON audit FOR EACH ROW EXECUTE FUNCTION audit_refuses()",
    "CREATE TRIGGER audit_refuses_truncate BEFORE TRUNCATE ON audit FOR EACH STATEMENT EXECUTE FUNCTION audit_refuses()",
)


def _make_account() -> None:
    op.create_table("account",
        sa.Column("id", KEY, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("display_name", sa.String(200), nullable=False),
        sa.Column("affiliation", sa.String(200), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("disabled_at", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_account"),
        sa.UniqueConstraint("name", name="uq_account_name")
    )


def _make_audit() -> None:
    op.create_table("audit",
        sa.Column("id", KEY, autoincrement=False, nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.Column("token", sa.String(16), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("subject", sa.String(200), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("previous_sha256", sa.String(64), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit")
    )
    op.create_index("ix_audit_action", "audit", ["action"])
    op.create_index("ix_audit_subject", "audit", ["subject"])


def _make_standing() -> None:
    op.create_table("standing",
        sa.Column("id", KEY, nullable=False),
        sa.Column("standing_key", sa.String(64), nullable=False),
        sa.Column("is_verified", sa.Boolean(), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("workload", sa.String(200), nullable=False),
        sa.Column("device", sa.String(200), nullable=False),
        sa.Column("is_cpu", sa.Boolean(), nullable=False),
        sa.Column("is_simulated", sa.Boolean(), nullable=False),
        sa.Column("method", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("batch_size", sa.BigInteger(), nullable=True),
        sa.Column("budget", sa.String(200), nullable=False),
        sa.Column("results", sa.Integer(), nullable=False),
        sa.Column("accounts", sa.Integer(), nullable=False),
        sa.Column("machines", sa.Integer(), nullable=False),
        sa.Column("reproduced", sa.Integer(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("changed_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_standing"),
        sa.UniqueConstraint("standing_key", "is_verified", name="uq_standing_standing_key_is_verified")
    )
    op.create_index("ix_standing_board", "standing", ["model", "device", "is_simulated", "is_verified", "workload", "batch_size"])
    op.create_index("ix_standing_facets", "standing", ["is_verified", "model", "device", "is_simulated", "method", "results"])


def _make_account_key() -> None:
    op.create_table("account_key",
        sa.Column("id", KEY, nullable=False),
        sa.Column("account_id", KEY, nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("public_key", sa.String(200), nullable=False),
        sa.Column("first_seen_at", MOMENT, nullable=False),
        sa.Column("revoked_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name="fk_account_key_account_id"),
        sa.PrimaryKeyConstraint("id", name="pk_account_key"),
        sa.UniqueConstraint("key_id", name="uq_account_key_key_id")
    )
    op.create_index("ix_account_key_account_id", "account_key", ["account_id"])


def _make_bundle() -> None:
    op.create_table("bundle",
        sa.Column("id", KEY, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("archive_sha256", sa.String(64), nullable=False),
        sa.Column("archive_bytes", sa.BigInteger(), nullable=False),
        sa.Column("manifest_sha256", sa.String(64), nullable=False),
        sa.Column("account_id", KEY, nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("workflow", sa.String(200), nullable=False),
        sa.Column("workflow_sha256", sa.String(200), nullable=False),
        sa.Column("run_id", sa.String(200), nullable=False),
        sa.Column("harness_version", sa.String(200), nullable=False),
        sa.Column("is_complete", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("submitted_at", MOMENT, nullable=False),
        sa.Column("checked_at", MOMENT, nullable=True),
        sa.Column("findings", sa.JSON(), nullable=False),
        sa.Column("state_reason", sa.Text(), nullable=False),
        sa.Column("state_changed_at", MOMENT, nullable=False),
        sa.Column("supersedes", sa.String(64), nullable=False),
        sa.Column("superseded_by", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name="fk_bundle_account_id"),
        sa.PrimaryKeyConstraint("id", name="pk_bundle"),
        sa.UniqueConstraint("name", name="uq_bundle_name")
    )
    op.create_index("ix_bundle_account_id_submitted_at", "bundle", ["account_id", "submitted_at"])
    op.create_index("ix_bundle_archive_sha256", "bundle", ["archive_sha256"])
    op.create_index("ix_bundle_state_id", "bundle", ["state", "id"])
    op.create_index("ix_bundle_workflow_id", "bundle", ["workflow", "id"])


def _make_competition() -> None:
    op.create_table("competition",
        sa.Column("id", KEY, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("title", sa.String(200), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("organiser_id", KEY, nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("workload", sa.String(200), nullable=False),
        sa.Column("device", sa.String(200), nullable=False),
        sa.Column("budget", sa.String(200), nullable=False),
        sa.Column("batch_size", sa.BigInteger(), nullable=True),
        sa.Column("seeds", sa.JSON(), nullable=False),
        sa.Column("metric", sa.String(32), nullable=False),
        sa.Column("opens_at", MOMENT, nullable=False),
        sa.Column("closes_at", MOMENT, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("closed_early_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["organiser_id"], ["account.id"], name="fk_competition_organiser_id"),
        sa.PrimaryKeyConstraint("id", name="pk_competition"),
        sa.UniqueConstraint("name", name="uq_competition_name")
    )


def _make_token() -> None:
    op.create_table("token",
        sa.Column("id", KEY, nullable=False),
        sa.Column("account_id", KEY, nullable=False),
        sa.Column("public_id", sa.String(16), nullable=False),
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("scopes", sa.String(200), nullable=False),
        sa.Column("label", sa.String(200), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=True),
        sa.Column("revoked_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name="fk_token_account_id"),
        sa.PrimaryKeyConstraint("id", name="pk_token"),
        sa.UniqueConstraint("public_id", name="uq_token_public_id")
    )
    op.create_index("ix_token_account_id", "token", ["account_id"])


def _make_mark() -> None:
    op.create_table("mark",
        sa.Column("id", KEY, nullable=False),
        sa.Column("bundle_id", KEY, nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("signature", sa.String(200), nullable=False),
        sa.Column("made_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["bundle_id"], ["bundle.id"], name="fk_mark_bundle_id"),
        sa.PrimaryKeyConstraint("id", name="pk_mark")
    )
    op.create_index("ix_mark_bundle_id", "mark", ["bundle_id"])


def _make_result() -> None:
    op.create_table("result",
        sa.Column("id", KEY, nullable=False),
        sa.Column("bundle_id", KEY, nullable=False),
        sa.Column("account_id", KEY, nullable=False),
        sa.Column("cell_id", sa.String(64), nullable=False),
        sa.Column("record_sha256", sa.String(64), nullable=False),
        sa.Column("submitted_at", MOMENT, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reproduced_count", sa.Integer(), nullable=False),
        sa.Column("repeated_count", sa.Integer(), nullable=False),
        sa.Column("workflow", sa.String(200), nullable=False),
        sa.Column("experiment", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("workload", sa.String(200), nullable=False),
        sa.Column("method", sa.String(200), nullable=False),
        sa.Column("method_source_sha256", sa.String(64), nullable=False),
        sa.Column("harness_version", sa.String(200), nullable=False),
        sa.Column("device", sa.String(200), nullable=False),
        sa.Column("target", sa.String(200), nullable=False),
        sa.Column("is_cpu", sa.Boolean(), nullable=False),
        sa.Column("is_simulated", sa.Boolean(), nullable=False),
        sa.Column("batch_size", sa.BigInteger(), nullable=True),
        sa.Column("budget", sa.String(200), nullable=False),
        sa.Column("budget_bytes", sa.BigInteger(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("reason", sa.String(200), nullable=False),
        sa.Column("truth", sa.String(32), nullable=False),
        sa.Column("peak_bytes", sa.BigInteger(), nullable=True),
        sa.Column("eager_peak_bytes", sa.BigInteger(), nullable=True),
        sa.Column("memory_saved", sa.Float(), nullable=True),
        sa.Column("step_seconds", sa.Float(), nullable=True),
        sa.Column("overhead", sa.Float(), nullable=True),
        sa.Column("overhead_low", sa.Float(), nullable=True),
        sa.Column("overhead_high", sa.Float(), nullable=True),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("largest", sa.BigInteger(), nullable=True),
        sa.Column("recomputes", sa.BigInteger(), nullable=True),
        sa.Column("moved_bytes", sa.BigInteger(), nullable=True),
        sa.Column("machine_hash", sa.String(64), nullable=False),
        sa.Column("telemetry_sha256", sa.String(64), nullable=False),
        sa.Column("samples_sha256", sa.String(64), nullable=False),
        sa.Column("comparison_key", sa.String(64), nullable=False),
        sa.Column("standing_key", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name="fk_result_account_id"),
        sa.ForeignKeyConstraint(["bundle_id"], ["bundle.id"], name="fk_result_bundle_id"),
        sa.PrimaryKeyConstraint("id", name="pk_result"),
        sa.UniqueConstraint("bundle_id", "cell_id", name="uq_result_bundle_id_cell_id")
    )
    op.create_index("ix_result_account_id_id", "result", ["account_id", "id"])
    op.create_index("ix_result_comparison_key", "result", ["comparison_key"])
    op.create_index("ix_result_method_state", "result", ["method", "state"])
    op.create_index("ix_result_model_device_state", "result", ["model", "device", "state"])
    op.create_index("ix_result_record_sha256", "result", ["record_sha256"])
    op.create_index("ix_result_samples_sha256", "result", ["samples_sha256"])
    op.create_index("ix_result_standing_key_state", "result", ["standing_key", "state"])
    op.create_index("ix_result_state_id", "result", ["state", "id"])
    op.create_index("ix_result_telemetry_sha256", "result", ["telemetry_sha256"])


def _make_verdict() -> None:
    op.create_table("verdict",
        sa.Column("id", KEY, nullable=False),
        sa.Column("bundle_id", KEY, nullable=False),
        sa.Column("account_id", KEY, nullable=False),
        sa.Column("claim", sa.String(200), nullable=False),
        sa.Column("experiment", sa.String(200), nullable=False),
        sa.Column("rule", sa.String(200), nullable=False),
        sa.Column("verdict", sa.String(32), nullable=False),
        sa.Column("obtained", sa.Text(), nullable=False),
        sa.Column("is_simulated", sa.Boolean(), nullable=True),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name="fk_verdict_account_id"),
        sa.ForeignKeyConstraint(["bundle_id"], ["bundle.id"], name="fk_verdict_bundle_id"),
        sa.PrimaryKeyConstraint("id", name="pk_verdict")
    )
    op.create_index("ix_verdict_account_id", "verdict", ["account_id"])
    op.create_index("ix_verdict_bundle_id", "verdict", ["bundle_id"])
    op.create_index("ix_verdict_claim_state", "verdict", ["claim", "state"])


def _make_agreement() -> None:
    op.create_table("agreement",
        sa.Column("id", KEY, nullable=False),
        sa.Column("result_id", KEY, nullable=False),
        sa.Column("other_id", KEY, nullable=False),
        sa.Column("account_id", KEY, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("differences", sa.JSON(), nullable=False),
        sa.Column("made_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name="fk_agreement_account_id"),
        sa.ForeignKeyConstraint(["other_id"], ["result.id"], name="fk_agreement_other_id"),
        sa.ForeignKeyConstraint(["result_id"], ["result.id"], name="fk_agreement_result_id"),
        sa.PrimaryKeyConstraint("id", name="pk_agreement"),
        sa.UniqueConstraint("result_id", "other_id", name="uq_agreement_result_id_other_id")
    )
    op.create_index("ix_agreement_other_id", "agreement", ["other_id"])
    op.create_index("ix_agreement_result_id_account_id_kind", "agreement", ["result_id", "account_id", "kind"])


def _make_entry() -> None:
    op.create_table("entry",
        sa.Column("id", KEY, nullable=False),
        sa.Column("competition_id", KEY, nullable=False),
        sa.Column("result_id", KEY, nullable=False),
        sa.Column("account_id", KEY, nullable=False),
        sa.Column("entered_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name="fk_entry_account_id"),
        sa.ForeignKeyConstraint(["competition_id"], ["competition.id"], name="fk_entry_competition_id"),
        sa.ForeignKeyConstraint(["result_id"], ["result.id"], name="fk_entry_result_id"),
        sa.PrimaryKeyConstraint("id", name="pk_entry"),
        sa.UniqueConstraint("competition_id", "result_id", name="uq_entry_competition_id_result_id")
    )
    op.create_index("ix_entry_account_id", "entry", ["account_id"])
    op.create_index("ix_entry_result_id", "entry", ["result_id"])
