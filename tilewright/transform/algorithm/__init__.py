"""Other ways to compute the same: Winograd, Strassen, wavefronts over recurrences."""
