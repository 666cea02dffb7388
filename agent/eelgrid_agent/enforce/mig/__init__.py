"""MIG layouts on the node: what exists, what is requested, and the transition between them."""
