"""What a model can be asked for: requests to items, and results to answers."""
