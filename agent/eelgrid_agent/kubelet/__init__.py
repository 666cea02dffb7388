"""Kubelet integration: device plugins, the DRA driver and the PodResources client."""
