"""Metrics of the controller: the catalogue, the text formats, and the families of each domain."""
