"""What alembic runs for a migration: the steps in the connection, and the transaction, of its caller."""

from alembic import context

from eelgrid_controller.runtime.postgresql.connections import SCHEMA
from eelgrid_controller.runtime.postgresql.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table_schema=SCHEMA,
    include_schemas=True,
)
with context.begin_transaction():
    context.run_migrations()
