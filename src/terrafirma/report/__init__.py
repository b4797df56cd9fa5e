"""Figures. Nothing here computes a result."""
