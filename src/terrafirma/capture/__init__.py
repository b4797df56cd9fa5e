"""From a model and data to what a network did on them."""
