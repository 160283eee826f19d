"""What children tell us: connector events, start-up milestones, vLLM metrics."""
