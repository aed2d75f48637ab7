"""Whether a correction learned from records makes predictions better, on programs and machines it has not seen."""
