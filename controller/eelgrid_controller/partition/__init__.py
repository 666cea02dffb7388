"""MIG layouts: which replicas, slices and layouts serve the request rates with the fewest GPUs or watts.

The planner works on measured points and the catalogue's geometry (problem, geometry, options, integer_program,
column_generation, plan). A change of a running fleet is planned, weighed against its cost and ordered into steps
(repartition, transition). Survey and recommendation connect it to the cluster state. Pure.
"""
