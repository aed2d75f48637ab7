"""What every form means: the interpreters, which are the reference for everything else."""
