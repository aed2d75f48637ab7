"""Loops written down as source text; no decision is made here."""
