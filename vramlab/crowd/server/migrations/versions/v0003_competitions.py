"""A competition can be corrected and withdrawn.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
_COLUMNS = ("corrected_at", "withdrawn_at", "withdrawn_reason")


def upgrade() -> None:
    """Of the competitions that there are none was."""
    op.add_column("competition", sa.Column("corrected_at", MOMENT, nullable=True))
    op.add_column("competition", sa.Column("withdrawn_at", MOMENT, nullable=True))
    op.add_column("competition", sa.Column("withdrawn_reason", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    """Without what was done."""
    for name in _COLUMNS:
        op.drop_column("competition", name)
