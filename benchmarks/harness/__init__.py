"""Shared by the benchmarks: starting runs and reading their results. Found beside the benchmark that is started."""
