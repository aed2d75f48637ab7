"""Reductions in parts: long ones split, ones over joined inputs taken apart."""
