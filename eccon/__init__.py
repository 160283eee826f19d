"""eccon: console, supervisor and stand-in for encoder-disaggregated serving on vLLM."""

__version__ = "0.1.0"
