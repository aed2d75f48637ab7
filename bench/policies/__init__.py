"""What policies can be held to: memory that they save over the zoo, and how near few plans come to the best of many."""
