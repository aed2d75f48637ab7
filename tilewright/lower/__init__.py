"""From a Plan to Loops: the plan made explicit, a pass a file, no decision left."""
