"""Grafana dashboards as code: `python deploy/dashboards/render.py` writes the JSON that the chart ships.

`queries` and `panels` are the vocabulary; `fleet`, `node`, `workloads`, `engine` and `budget`
each say one dashboard in it; `render` writes them; `reading` reads the JSON back, for tests
and for `draw`, which draws a dashboard's data from a Prometheus without a Grafana.
"""
