"""Objects of the Kubernetes API as immutable values. Pure parsing; decides nothing."""
