"""What vLLM 0.30 with RblnECNixlConnector does, asserted alike of the real thing and of the stand-in."""
