"""What is known of a form without running it: its grammar, simplification, products and decisions."""
