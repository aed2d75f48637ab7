"""What tuning can be held to: that its plans are plans, what it gains, and what it takes for a gain that is none."""
