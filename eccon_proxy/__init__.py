"""eccon-proxy: sends each media item of a chat request to an encoder, then the request to the PD."""

__version__ = "0.1.0"
