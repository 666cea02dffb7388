"""Objects of the Kubernetes API as immutable values, and how they belong together. Pure parsing."""
