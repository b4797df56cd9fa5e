"""Residual flows on torch: invertible networks whose log-determinants are power series (Chen et al., NeurIPS 2019).

Import the files here only after ``terrafirma.errors.require("torch", extra="torch")``.
"""
