"""`python -m eccon_proxy`."""

from eccon_proxy.cli import main

main()
