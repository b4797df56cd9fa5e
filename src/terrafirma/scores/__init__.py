"""Unreliability scores: higher = less reliable, for every one of them."""
