"""Measures Paceline against others: contestants take turns in the same processes, and a result is a ratio."""
