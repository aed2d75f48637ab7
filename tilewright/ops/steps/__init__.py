"""Operators in steps: control flow, recurrence, running sums, suppression."""
