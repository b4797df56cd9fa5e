"""Measured comparisons: how fast and how small terrafirma is, beside what else could do the work."""
