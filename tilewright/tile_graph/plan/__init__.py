"""The Plan: a tree of tiles over memory levels, as data and as text."""
