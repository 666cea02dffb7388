"""PostgreSQL behind the journal: connections, schema, leadership and the journal itself; imported only for a URL of one."""
