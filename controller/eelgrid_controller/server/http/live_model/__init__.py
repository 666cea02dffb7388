"""Pure model of the live page: the state and telemetry of one moment as small columns, and the changes since."""
