"""What a machine and a cluster can do, and what to change where they cannot."""
