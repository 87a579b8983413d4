"""Parameter servers of others, each a program of its own, to compare ours with."""
