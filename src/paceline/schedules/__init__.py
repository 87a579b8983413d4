"""Pure: the order of a pipeline's passes, and formulas for its time and memory."""
