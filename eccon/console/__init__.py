"""The Textual console: draws the daemon's state."""
