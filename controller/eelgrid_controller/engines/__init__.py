"""Engines: adapters to the systems that run the work, one package for each."""
