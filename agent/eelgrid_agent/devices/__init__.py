"""The devices of a node: the port, and the adapters that read and change GPUs behind it."""
