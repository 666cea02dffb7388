"""Which calls only read: how their names begin, said here once for the tests and not taken from the code."""

READS = (
    "Get",
    "Read",
    "List",
    "Watch",
    "Explain",
    "Export",
    "Query",
    "Recommend",
    "Imagine",
    "WhatIf",
    "PlanCapacity",
    "WhoAmI",
)
