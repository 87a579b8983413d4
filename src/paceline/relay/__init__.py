"""A machine's door to the others: transfers, messages and event streams between machines."""
