"""A slow twin of the queues' rules: recursive formulas over plain dicts, evaluated anew for each question."""

from math import inf


class NaiveQueues:
    """Of one resource: `queues` maps a name to (parent, nominal, borrowing limit, lending limit, usage limit)."""

    def __init__(self, queues):
        self.queues = queues
        self.running = []

    def children(self, name):
        return [key for key, one in self.queues.items() if one[0] == name]

    def used(self, name):
        return sum(amount for leaf, amount in self.running if leaf == name) + sum(
            self.used(child) for child in self.children(name)
        )

    def quota(self, name):
        return self.queues[name][1] + sum(self.quota(child) - self.kept(child) for child in self.children(name))

    def nominal(self, name):
        return self.queues[name][1] + sum(map(self.nominal, self.children(name)))

    def kept(self, name):
        lending = self.queues[name][3]
        return 0 if lending is None else max(0, self.quota(name) - lending)

    def held(self, name):
        children = self.children(name)
        if not children:
            return self.used(name)
        return sum(max(0, self.held(child) - self.kept(child)) for child in children)

    def available(self, name):
        """Kueue's formula, without letting an overdrawn parent take what a queue keeps."""
        parent, _, borrowing, _, _ = self.queues[name]
        if not parent:
            return self.quota(name) - self.held(name)
        own = max(0, self.kept(name) - self.held(name))
        above = max(0, self.available(parent))
        if borrowing is not None:
            stored = self.quota(name) - self.kept(name)
            above = min(above, stored - max(0, self.held(name) - self.kept(name)) + borrowing)
        return own + above

    def below_limits(self, name, amount):
        while name:
            parent, _, _, _, limit = self.queues[name]
            if limit is not None and self.used(name) + amount > limit:
                return False
            name = parent
        return True

    def fits(self, leaf, amount):
        return amount <= self.available(leaf) and self.below_limits(leaf, amount)

    def potential(self, name):
        parent, _, borrowing, _, _ = self.queues[name]
        if not parent:
            return self.quota(name)
        most = inf if borrowing is None else self.quota(name) + borrowing
        return min(most, self.kept(name) + self.potential(parent))

    def borrowed(self, name):
        return max(0, self.held(name) - self.quota(name))

    def share(self, name):
        parent = self.queues[name][0]
        borrowed = self.borrowed(name)
        if not parent or not borrowed:
            return 0.0
        return borrowed / self.potential(parent) if self.potential(parent) else inf
