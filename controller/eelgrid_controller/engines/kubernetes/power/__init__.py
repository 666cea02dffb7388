"""PowerPolicy objects: parsing, merging into one policy, and their status. Pure decisions."""
