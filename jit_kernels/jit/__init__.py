"""Compiles CUDA sources on first use and keeps what was built. Knows nothing of any operator."""
