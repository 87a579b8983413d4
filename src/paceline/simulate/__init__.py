"""Predicts runs: by closed forms where there are some, else by a simulation of the same policies."""
