"""The steps by which alembic brings a database from one version of the schema to the next."""
