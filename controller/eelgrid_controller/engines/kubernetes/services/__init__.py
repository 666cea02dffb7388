"""InferenceServices: parsing, the number of replicas, and the status. Pure decisions."""
