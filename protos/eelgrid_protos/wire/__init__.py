"""Generated from protos/eelgrid/v1 by protos/generate.py; do not edit."""
