"""HTTP servers of the controller (metrics, probes, live page, admission webhook) and the scraper."""
