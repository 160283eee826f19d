"""The whole product: real processes, from the command line to the answer."""
