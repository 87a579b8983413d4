"""Checks of a machine and of a cluster, with what to change where one fails."""
