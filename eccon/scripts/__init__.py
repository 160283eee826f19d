"""Launch scripts of the guide's kind: read without running anything, and written from a topology."""
