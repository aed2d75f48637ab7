"""A Program shared out to a cluster: strategies priced, chosen by an integer program inside a stage, and stages by
dynamic programming."""
