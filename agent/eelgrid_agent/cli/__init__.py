"""Command line of the agent: subcommands that query a running agent, and helpers for terminal output."""
