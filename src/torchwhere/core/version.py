"""The version, where everything that needs it can import it without cost."""

__version__ = "0.1.0"
