"""The closed loop in simulation: services, training, tariff, budgets and a failing node under the real controller."""
