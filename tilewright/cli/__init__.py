"""The `tilewright` command: one file a subcommand."""
