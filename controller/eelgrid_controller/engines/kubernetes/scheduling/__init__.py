"""kube-scheduler's filter rules, evaluated here: node affinity, topology spread, pod affinity, volumes. Pure."""
