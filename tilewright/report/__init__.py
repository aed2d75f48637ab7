"""Reports: what was compiled, why, and how fast it runs beside other runtimes."""
