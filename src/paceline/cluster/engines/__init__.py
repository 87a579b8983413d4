"""Engines that start a run's processes: local, torchrun, Ray."""
