"""What surrounds the call of a model: arguments, profiles, progress, work in the background."""
