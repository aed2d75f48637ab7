"""Contributed operators (com.microsoft)."""
