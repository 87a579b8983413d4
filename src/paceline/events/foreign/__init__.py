"""Traces that other programs have written, as events: of torch's profiler, in Chrome's format, and tables."""
