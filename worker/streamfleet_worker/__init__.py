"""The process beside the model: claims requests, runs them in batches, publishes tokens."""
