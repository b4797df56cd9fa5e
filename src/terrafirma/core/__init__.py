"""The paper: patterns, regions, weightings, normalisers and the bound.

==================  =================================================
``patterns``        activations -> bits in 64-bit words
``regions``         populated activation regions, counts and errors
``weighting``       the closeness d, by Hamming distance
``normalizers``     u, z and w_l
``bound``           density, smooth error, gap and bound, in logs
``sums``            over all training samples around a query
``_pairs``          distances between all pairs, in numba
``_kernels``        the other loops
``_jit``            how they are compiled
``_threads``        the map that runs them
==================  =================================================

Nothing here knows torch, files, printing or search.
"""
