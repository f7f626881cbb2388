"""Measurements: FLOPs, the step against native, and their documents."""
