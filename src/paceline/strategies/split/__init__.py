"""Replicas of several workers, each of which has a part of the model."""
