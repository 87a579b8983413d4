"""Operations of a whole group."""
