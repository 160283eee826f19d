"""`python -m eccon`."""

from eccon.cli import main

if __name__ == "__main__":
    main()
