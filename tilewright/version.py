"""The version of this package; alone here, so that a build can read it without its dependencies."""

VERSION = "0.1.0"
