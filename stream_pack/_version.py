"""The version of this package, in one place: setup.cfg and the command line read it here."""

__version__ = "0.1.0"
