"""What each result measured is kept with it, to tell a copy that was changed a little.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Empty in the rows that there are; the server fills them from the archives when it starts."""
    op.add_column("result", sa.Column("fingerprint", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Without what was kept."""
    op.drop_column("result", "fingerprint")
