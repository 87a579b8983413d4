"""Choosing a strategy: what could be run, what each would bring, and why."""
