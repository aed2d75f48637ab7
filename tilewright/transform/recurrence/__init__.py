"""Steps that repeat: found again as Scans, stacked, run along diagonals."""
