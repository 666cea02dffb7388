"""What was made of a value is made once while that value is asked for, and never given for another."""

from eelgrid_controller.state.policy import cache_by_identity, get_node_budgets_w
from eelgrid_protos.messages import BudgetScope, Policy, PowerBudget


def budgets(limit_w):
    return tuple(PowerBudget(scope=BudgetScope.NODE, name=f"n{at}", limit_w=limit_w) for at in range(3))


def test_it_is_made_once_for_each_object():
    made = []

    @cache_by_identity
    def lengths(of):
        made.append(of)
        return {"length": len(of)}

    one, equal = budgets(100.0), budgets(100.0)
    assert one == equal
    assert lengths(one) is lengths(one)
    assert lengths(equal) == {"length": 3}
    assert len(made) == 2


def test_what_is_forgotten_is_made_again_and_an_old_one_is_never_given_for_a_new():
    found = [get_node_budgets_w(Policy(budgets=budgets(float(watts)))) for watts in range(1, 60)]
    assert [each["n1"] for each in found] == [float(watts) for watts in range(1, 60)]
