"""A stand-in for `vllm serve`: same flags, endpoints, wire and failures."""
