"""Agents' streams that end at ingest processes: those processes, and their service at the controller that leads."""
