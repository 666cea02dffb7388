"""Generated from protos/eelgrid/v1 and protos/kubelet by protos/generate.py; do not edit."""
