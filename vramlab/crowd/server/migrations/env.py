"""What Alembic runs around the steps, on the connection that `database.migrate` hands over."""

from __future__ import annotations

from alembic import context

from vramlab.crowd.server.tables import Base


def run() -> None:
    """All steps up to the wanted one, in one transaction."""
    connection = context.config.attributes["connection"]
    # SQLite cannot alter most things in place: batch mode copies the table.
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=connection.dialect.name == "sqlite",
                      compare_type=True)
    context.run_migrations()


if __name__ == "env_py":  # the name under which Alembic loads this file; an import by anybody else runs nothing
    run()
