"""Choosing a strategy: candidates, their predicted speed, and the reason for the choice."""
