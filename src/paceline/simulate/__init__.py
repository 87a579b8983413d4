"""Predicts what a run will do: closed forms where there are some, a simulation of the same policies where not."""
