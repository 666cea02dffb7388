"""Inference services: from a configuration and a rate to a latency quantile, and from an objective to instances.

Owns queueing, the correction by live quantiles, and the scaler. Must not know
engines, MIG geometry or the wire.

    stations, queueing, sizing, tokens      a configuration and a rate to a quantile, and back
    exposition, metric_names, live          two pages of metrics to a window
    correction, forecast, scaler            a window to how slow the service is, what comes, what should be
    models, watch                           all of that for one service
    instances, search, joint, windows       services on a shared pool, least energy, window by window
"""
