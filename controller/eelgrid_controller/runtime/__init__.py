"""Runtime of the controller: configuration, event loop, journal and its files."""
