"""Accuracy of predicted profiles: every measured data set, held-out configurations and workloads, compared with peers."""
