"""Speed, memory and accuracy of this checkout against their budgets: `python -m benchmarks`.

Nothing here is a test: times depend on the machine and on what else it does.
"""
