"""Who may do what: rules as RBAC writes them, by the token of a request."""

from tests.fakes.kubernetes.faults import forbidden

ALL = [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]


class Access:
    """Tokens, their users and their rules."""

    def __init__(self):
        self.users = {}  # by token: (user name, rules)

    def grant(self, token, rules=ALL, user=None):
        """From now on this token may do this; rules are those of a Role: verbs, apiGroups, resources."""
        self.users[token] = (user or f"system:serviceaccount:eelgrid:{token}", rules)

    def may(self, token, verb, group, resource, name=""):
        """Whether a token's user may; the resource may be a part, as `pods/binding`."""
        return any(_covers(rule, verb, group, resource, name) for rule in self.users[token][1])

    def check(self, token, verb, kind, part, namespace, name):
        """Pass, or the fault that the real server answers."""
        resource = f"{kind.plural}/{part}" if part else kind.plural
        if self.may(token, verb, kind.group, resource, name):
            return
        user = self.users[token][0]
        where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
        why = f'User "{user}" cannot {verb} resource "{resource}" in API group "{kind.group}"{where}'
        raise forbidden(kind, name, why)


def _covers(rule, verb, group, resource, name):
    return (
        _in(verb, rule["verbs"])
        and _in(group, rule.get("apiGroups", [""]))
        and (
            _in(resource, rule["resources"])
            or ("/" in resource and f"*/{resource.partition('/')[2]}" in rule["resources"])
        )
        and (not rule.get("resourceNames") or name in rule["resourceNames"])
    )


def _in(one, several):
    return "*" in several or one in several
