"""Triton kernels. Each has an eager reference on top, a test against it, and a benchmark that decides its use."""
