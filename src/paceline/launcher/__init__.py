"""Runs as their launcher sees them: options, folder, display, errors; and `launch`, which runs a function as a team."""
