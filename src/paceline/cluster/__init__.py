"""Who is here: how the members of a team find each other, and the engine that starts and supervises them."""
