"""Access to the Kubernetes API: port, client, errors, retries, informers and leader election."""
