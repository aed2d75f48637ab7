"""What need not be computed is left out: constants, equal and dead computes, unread parts."""
