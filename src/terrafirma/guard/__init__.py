"""The front door: model, score and policy in one object."""
