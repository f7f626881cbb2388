"""Data path: LeRobot datasets to WebDataset shards, and shards to batches. Knows nothing of models."""
