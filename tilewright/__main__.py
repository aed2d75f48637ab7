"""`python -m tilewright` is the `tilewright` command."""

from tilewright.cli.main import command

if __name__ == "__main__":
    command()
