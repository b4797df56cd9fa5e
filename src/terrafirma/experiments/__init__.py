"""The paper's study, and the demonstration."""
