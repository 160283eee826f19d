"""Pictures in the terminal: what it can draw, how they are sent, and which cells they take."""
