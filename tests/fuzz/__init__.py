"""A grammar-based fuzzer of everything that a role may send: accepted shapes with extreme values.

The property: no input that a role may send changes what another principal sees, beyond what the
role grants. `grammar` makes messages from the contract's own rules, `scene` runs a real controller
with attackers and an honest agent and operator beside them, who check after each batch that they
are served and that what is theirs is as they left it. `python -m tests.fuzz --seconds 3600`.
"""
