"""Helpers of the tests: teams of forked processes, hosts, faults, checkers and reference results."""
