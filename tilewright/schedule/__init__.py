"""From a Program to a Plan: which computes share a kernel, where each intermediate lives, every tile."""
