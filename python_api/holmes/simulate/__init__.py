"""Cost model and event-driven simulator of a training step. Runs on a laptop: no torch, no GPU."""
