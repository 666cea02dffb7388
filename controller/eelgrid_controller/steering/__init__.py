"""Steering: what was seen of services and jobs becomes what should be: replicas and power limits.

Owns how the planners are put to work on a running fleet. Must not know how anything
is scraped, journaled or sent: it is told events and answers with instructions.

    events, standing, settings      what comes in, what operators see, what may be set
    services                        one watch for each service
    jobs, pricing                   one exploration for each job, and what prices do to it
    sharing                         ceilings for jobs from budgets
    steering                        the object that holds them
"""
